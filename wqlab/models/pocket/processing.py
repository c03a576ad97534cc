"""From words and videos to the pocket VLM's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import BatchFeature, ProcessorMixin

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.models.pocket import prompt
from wqlab.models.video import Frames, read_video, sample_array, stack

#: Tokens of the context that are kept free for an answer.
_ANSWER_ROOM = 32
#: What transformers' `apply_chat_template` adds to a call; here it changes nothing.
_CHAT_ARGUMENTS = {"do_sample_frames", "add_special_tokens", "padding"}


class PocketVLMProcessor(ProcessorMixin):  # type: ignore[misc]
    """Tokenizer and video reader in one.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        SmolLM2's.
    num_patches, frame_size, num_frames : int
        As in `PocketVLMConfig`.
    context : int
        Tokens that the model holds, visual ones included.
    chat_template : str
        Jinja; the default is the format the model was trained in.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        num_patches: int = 64,
        frame_size: int = 256,
        num_frames: int = 32,
        context: int = 8192,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(tokenizer, chat_template=chat_template or prompt.CHAT_TEMPLATE)
        self.num_patches, self.frame_size, self.num_frames, self.context = num_patches, frame_size, num_frames, context

    @property
    def model_input_names(self) -> list[str]:
        """The names of what a call returns."""
        return [*self.tokenizer.model_input_names, "pixel_values_videos"]

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        num_frames: int | None = None,
        return_tensors: str | None = "pt",
        images: None = None,
        audio: None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return the inputs of `generate`.

        Parameters
        ----------
        text : str or sequence of str
            Whole prompts (`wqlab.models.pocket.prompt`, or `apply_chat_template`), with one ``<video>`` where a video goes.
        videos : path, uint8 array [T, H, W, 3], or a list of them
            As many as there are ``<video>``, in order. Each is sampled uniformly, and its centre square resized to 256 x 256.
        num_frames : int, optional
            Frames to take of each video; one with fewer gives all it has. Default: the processor's (32).
        return_tensors : {"pt", None}
            Tensors, or lists and arrays.

        Returns
        -------
        BatchFeature
            ``input_ids`` and ``attention_mask`` [batch, seq], padded on the left; with videos also ``pixel_values_videos``, uint8
            [N, T, 3, 256, 256].

        Raises
        ------
        ParameterError
            When text and videos do not match, a video cannot be used, videos of a batch differ in length, or the frames do not
            fit into the context.
        DamagedFileError
            For a video file of which a part is missing.
        UnsupportedError
            For images or sound.
        """
        if images is not None or audio is not None:
            raise UnsupportedError("the pocket VLM reads text and videos; for a picture give a video of one frame [1, H, W, 3]")
        if text is None:
            raise ParameterError(f"text = None is refused: give a prompt, with {prompt.VIDEO} where the video goes")
        unknown = sorted(kwargs.keys() - _CHAT_ARGUMENTS)
        if unknown:
            raise ParameterError(f"unknown arguments {', '.join(unknown)}; known: text, videos, num_frames, return_tensors")
        texts = [text] if isinstance(text, str) else list(text)
        given = _flat(videos)
        placed = sum(entry.count(prompt.VIDEO) for entry in texts)
        if placed != len(given):
            raise ParameterError(
                f"the text has {placed} {prompt.VIDEO} and {len(given)} videos were given: "
                f"write {prompt.VIDEO} once for each video, where it goes, and nowhere else"
            )
        wanted = self.num_frames if num_frames is None else num_frames
        rest, expanded, read = iter(given), [], []
        for entry in texts:
            if prompt.VIDEO_TOKEN in entry:
                raise ParameterError(f"the text contains {prompt.VIDEO_TOKEN}, which stands for visual tokens here; leave it out")
            own = [next(rest) for _ in range(entry.count(prompt.VIDEO))]
            frames = self._read(own, len(prompt.encode(self.tokenizer, entry.replace(prompt.VIDEO, ""))), wanted)
            for video in frames:
                entry = entry.replace(prompt.VIDEO, prompt.VIDEO_TOKEN * (len(video) * self.num_patches), 1)
            expanded.append(entry)
            read += frames
        data = dict(self.tokenizer(expanded, padding=True, padding_side="left", add_special_tokens=False))
        if read:
            data["pixel_values_videos"] = stack(read)
        return BatchFeature(data, tensor_type=return_tensors)

    def _read(self, videos: list[Any], text_tokens: int, num_frames: int) -> list[Frames]:
        """Return the frames of the videos of one prompt, or say how many would fit."""
        limit = max((self.context - _ANSWER_ROOM - text_tokens) // self.num_patches, 0)
        asked, frames = 0, []
        for video in videos:
            # One more than fits is enough to know that they do not fit; a video that is short enough gives all it has either way.
            count = min(num_frames, limit + 1)
            if isinstance(video, str | Path):
                found = read_video(video, count, self.frame_size)
                frames.append(found.frames)
                asked += min(num_frames, found.num_available)
            else:
                frames.append(sample_array(video, count, self.frame_size))
                asked += min(num_frames, len(video))
        if asked > limit:
            way_out = f"pass num_frames={limit // len(videos)} or less" if limit >= len(videos) else "shorten the text"
            raise ParameterError(
                f"{asked} frames are {asked * self.num_patches:,} visual tokens; beside {text_tokens:,} tokens of text and room "
                f"for an answer, the context of {self.context:,} tokens holds {limit} frames: {way_out}"
            )
        return frames


def _flat(videos: Any) -> list[Any]:
    """Return a flat list of what was given as videos: one, several, or a list for each prompt."""
    if videos is None:
        return []
    if isinstance(videos, str | Path) or getattr(videos, "ndim", 0) == 4:
        return [videos]
    if isinstance(videos, list | tuple) or getattr(videos, "ndim", 0) > 4:
        return [video for entry in videos for video in _flat(entry)]
    return [videos]  # whatever it is, `sample_array` says what is wrong with it
