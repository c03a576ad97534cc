"""Videos cut into windows and scored against texts, with the pocket VLM's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wqlab import records
from wqlab.errors import ParameterError
from wqlab.models.shipped import POCKET_VLM
from wqlab.types import Input

if TYPE_CHECKING:
    from torch import Tensor

    from wqlab.evals.pocketbench import Item

Floats = NDArray[np.float64]
Frames = NDArray[np.uint8]


class Windows(NamedTuple):
    """How visual tokens are cut and scored: the paper's S, what it counts, and a registered scorer."""

    window_size: int
    window_unit: Literal["tokens", "frames"]
    scorer: str

    def span(self) -> int:
        """Return the tokens of a window."""
        from wqlab.windows.batch import tokens_per_window

        return tokens_per_window(self.window_size, self.window_unit, tokens_per_frame())

    def of(self, num_frames: int, video: str) -> int:
        """Return how many windows a video of `num_frames` has; `video` names it in the error.

        Raises
        ------
        ParameterError
            When these are fewer than two: nothing can be preferred then.
        """
        tokens, span = num_frames * tokens_per_frame(), self.span()
        if tokens < 2 * span:
            half = tokens // 2
            raise ParameterError(
                f"window_size = {self.window_size} {self.window_unit} is refused: {video} has {tokens} visual tokens ({num_frames} "
                f"frames), and a heatmap needs two windows of them; choose at most {half} tokens ({half / tokens_per_frame():g} "
                "frames), or take more frames of a longer video"
            )
        return tokens // span


@lru_cache(maxsize=1)
def vlm() -> Any:
    """Return the pocket VLM, loaded once."""
    from wqlab.models import load

    return load(POCKET_VLM)


def tokens_per_frame() -> int:
    """Return the visual tokens of one frame."""
    return int(vlm().model.config.num_patches)


@lru_cache(maxsize=4096)
def embed(text: str) -> Tensor:
    """Return the embeddings of a text, [tokens, hidden], as they lie in a prompt."""
    import torch

    from wqlab.models.pocket.prompt import encode

    with torch.inference_mode():
        ids = torch.tensor(encode(vlm().tokenizer, text))
        embeddings: Tensor = vlm().model.get_input_embeddings()(ids)
    return embeddings


def _see(frames: Tensor) -> Tensor:
    """Return the visual embeddings of one video, [tokens, hidden], of its frames, uint8 [1, frames, 3, height, width]."""
    import torch

    from wqlab.evals.threads import polite_threads

    with torch.inference_mode(), polite_threads():
        visual: Tensor = vlm().model.get_video_features(frames)[0]
    return visual


class Clip(NamedTuple):
    """A video file as the model sees it.

    Parameters
    ----------
    visual : Tensor
        [tokens, hidden].
    frames : ndarray
        uint8 [frames, height, width, 3], at half size.
    times_s : tuple of float
        When each frame is shown.
    source : Input
        The file.
    """

    visual: Tensor
    frames: Frames
    times_s: tuple[float, ...]
    source: Input


def read(path: Path, num_frames: int) -> Clip:
    """Read a uniform sample of a video file, at most `num_frames` frames.

    Raises
    ------
    ParameterError, DamagedFileError
        As `wqlab.models.video.read_video`.
    """
    # A new file under an old name is another video.
    return _read(path, num_frames, path.stat().st_mtime_ns if path.is_file() else None)


@lru_cache(maxsize=2)
def _read(path: Path, num_frames: int, modified: int | None) -> Clip:
    import torch

    from wqlab.models.video import read_video, stack

    video = read_video(path, num_frames)
    visual = _see(torch.from_numpy(stack([video.frames])))
    return Clip(visual, _half(video.frames), video.timestamps_s, Input(f"clip {path.name}", records.sha256_file(path)))


@lru_cache(maxsize=1024)
def item(split: str, seed: int, num_frames: int, index: int) -> Item:
    """Return one video of PocketBench, not drawn yet, with its questions."""
    from wqlab.evals import pocketbench

    return next(pocketbench.items(split, seed, num_frames, start=index))


@lru_cache(maxsize=64)
def watch(split: str, seed: int, num_frames: int, index: int) -> Tensor:
    """Return the visual embeddings of one PocketBench video, [tokens, hidden]."""
    from wqlab.evals import pocketbench

    return _see(pocketbench.draw([item(split, seed, num_frames, index)]))


def frames_of(one: Item) -> Frames:
    """Return the frames of a PocketBench video, uint8 [frames, height, width, 3], at half size."""
    from wqlab.evals import pocketbench

    return _half(pocketbench.draw([one])[0].permute(0, 2, 3, 1).numpy())


def _half(frames: NDArray[Any]) -> Frames:
    count, height, width, _ = frames.shape
    small: Frames = frames.reshape(count, height // 2, 2, width // 2, 2, 3).mean(axis=(2, 4)).round().astype(np.uint8)
    return small


def similarity(texts: Sequence[str], visual: Tensor, windows: Windows) -> Floats:
    """Return the score of each window for each text, [texts, windows]."""
    from wqlab.windows import scorers

    scorer, span = scorers.create(windows.scorer), windows.span()
    # One text at a time, because a batch would copy the video for each; in float64 already, or each score would make that copy.
    video = [visual.double()]
    return np.stack([scorer.score([embed(text)], video, window_size=span).values[0].numpy() for text in texts])
