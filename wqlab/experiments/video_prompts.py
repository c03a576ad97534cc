"""PocketBench videos as prompts of the pocket VLM, for the experiments that look into the model while it reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from wqlab.experiments import Parameters
from wqlab.models.shipped import POCKET_VLM, POCKET_VLM_PARTS
from wqlab.types import Input

if TYPE_CHECKING:
    from torch import Tensor

#: A stream that neither training nor tuning has seen, the bench's.
SEED = 1000
#: What `quick` makes of the videos.
QUICK = {"num_frames": 8, "num_videos": 1}


class VideoParameters(Parameters):
    """Parameters of an experiment that shows the pocket VLM on video beside a text model on prose.

    Parameters
    ----------
    video : {"hard", "easy", "none"}
        The split of PocketBench that the pocket VLM watches; ``none``: prose only.
    num_frames : int
        Frames per video, 64 visual tokens each.
    num_videos : int
        The first so many of the stream; neighbours differ in task. Results are means over them.
    video_seed : int
        Which stream.
    """

    video: Literal["hard", "easy", "none"] = Field("hard", description="PocketBench split that the pocket VLM watches, or none")
    num_frames: int = Field(32, ge=8, le=100, description="frames per video, 64 visual tokens each")
    num_videos: int = Field(4, ge=1, le=96, description="videos, each with its question")
    video_seed: int = Field(SEED, ge=0, description="stream of videos")

    def watched(self) -> tuple[str, int, int, int]:
        """Return what decides the prompts: split, seed, frames per video and number of videos."""
        chosen = {"num_frames": self.num_frames, "num_videos": self.num_videos, **(QUICK if self.quick else {})}
        return self.video, self.video_seed, chosen["num_frames"], chosen["num_videos"]

    def video_parts(self) -> list[str]:
        """Return what must be fetched for the videos."""
        return [] if self.video == "none" else [*POCKET_VLM_PARTS, "clips"]


class VideoPrompt(NamedTuple):
    """One conversation, up to where the answer begins.

    Parameters
    ----------
    embeddings : Tensor
        [1, seq, hidden], for ``inputs_embeds``.
    start, stop : int
        Of the visual tokens; the chat's opening lies before them, the question and its options after.
    words : Tensor
        [1, words, hidden], the question and its options without the chat's markers: what the window search compares.
    """

    embeddings: Tensor
    start: int
    stop: int
    words: Tensor


def prompts(loaded: Any, split: str, seed: int, num_frames: int, num_videos: int) -> Iterator[VideoPrompt]:
    """Yield one prompt per video, in the format that the pocket VLM was trained in.

    Parameters
    ----------
    loaded : LoadedVLM
        Of `wqlab.models.pocket.load`.
    split, seed, num_frames, num_videos
        As `VideoParameters`.
    """
    import torch

    from wqlab.evals import pocketbench
    from wqlab.models.pocket import prompt

    embed = loaded.model.get_input_embeddings()
    opening = torch.tensor([prompt.prefix_ids(loaded.tokenizer)])
    for item in pocketbench.items(split, seed, num_frames, stop=num_videos):
        question = item.questions[0]
        asked = torch.tensor([prompt.question_ids(loaded.tokenizer, question.text, question.options)])
        words = torch.tensor([prompt.encode(loaded.tokenizer, prompt.with_options(question.text, question.options))])
        video = loaded.model.get_video_features(pocketbench.draw([item]))
        start = opening.shape[1]
        embeddings = torch.cat([embed(opening), video, embed(asked)], dim=1)
        yield VideoPrompt(embeddings, start, start + video.shape[1], embed(words))


def describe(split: str, seed: int, num_frames: int, num_videos: int) -> str:
    """Return what was watched, for an evidence."""
    videos = "1 video" if num_videos == 1 else f"{num_videos} videos"
    tokens = f"{num_frames * 64:,} visual tokens"
    return f"{POCKET_VLM} on {videos} of {num_frames} frames ({tokens} each; PocketBench {split}, seed {seed})"


def generator() -> Input:
    """Return the generator of the videos as an input."""
    from wqlab.evals import pocketbench

    return Input(f"PocketBench {pocketbench.VERSION} generator", pocketbench.generator_hash())


def both_notes(prose: str, video: str) -> list[str]:
    """Return what must be said of the weights; the pocket VLM's note often repeats that of the language model inside it."""
    return [note for note in ([video] if prose in video else [prose, video]) if note]
