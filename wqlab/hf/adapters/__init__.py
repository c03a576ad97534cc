"""What a method must know about a family of video-language models, one file each, found by the model type.

A new family is a new file in this package whose class is registered as ``@register("adapter", "<model_type>")``; most families
derive from `PlaceholderAdapter` and say little more than which tokens hold the places of their images and videos.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from wqlab import registry
from wqlab.errors import ParameterError, UnknownNameError, UnsupportedError

#: Which words of a prompt stand for it: those of the user's last turn, or all of them.
Text = Literal["question", "all"]


class Adapter(ABC):
    """One family of models. `inputs` is always what the family's processor returns, or a part of it with ``input_ids``."""

    @abstractmethod
    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int | None:
        """Return how many visual tokens one frame takes; None when that is not one number, or needs `inputs` to tell."""

    @abstractmethod
    def visual_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return a bool Tensor [batch, seq], true where a visual token stands; all false for a prompt of words only."""

    @abstractmethod
    def question_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return a bool Tensor [batch, seq], true for the words of the user's last turn, as nearly as the family can tell."""

    @abstractmethod
    def visual_embeddings(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Return the embeddings that stand at the visual positions, [num_visual, hidden] for each row of the batch."""

    def without_pixels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return `inputs` for a cache that holds their images and videos already. Families without pixels return all."""
        return dict(inputs)

    def text_embeddings(self, model: Any, inputs: Mapping[str, Any], text: Text = "question") -> list[Tensor]:
        """Return the embeddings of the question's tokens, or of all that is no visual token and no padding.

        Returns
        -------
        list of Tensor
            [num_tokens, hidden] for each row of the batch, in the embedding's dtype.

        Raises
        ------
        ParameterError
            When a row has no such token, or for another `text`.
        """
        if text not in get_args(Text):
            raise ParameterError(f"text = {text!r} is not one of {', '.join(get_args(Text))}")
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        if text == "question":
            positions = self.question_positions(model, inputs)
        else:
            positions = ~self.visual_positions(model, inputs)
            mask = inputs.get("attention_mask")
            if mask is not None:
                positions &= mask[:, -positions.shape[1] :] != 0  # a mask may also cover what a cache holds already
        empty = (~positions.any(1)).nonzero().flatten().tolist()
        if empty:
            raise ParameterError(
                f"row {empty[0]} of the prompt has no text to compare its windows with ({text}); ask something after the video, "
                "or take all text with text='all'"
            )
        return [row[at] for row, at in zip(embeddings, positions, strict=True)]


@dataclass(frozen=True)
class Places:
    """Where one kind of visual input goes, and what its features are made of.

    Parameters
    ----------
    kind : {"image", "video"}
        The config names the placeholder ``<kind>_token_id``, the model makes embeddings with ``get_<kind>_features``.
    pixels : str
        The processor's name for the pixels.
    needs, takes : tuple of str
        What else ``get_<kind>_features`` must have, and may have, of the processor's output.
    """

    kind: Literal["image", "video"]
    pixels: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


class PlaceholderAdapter(Adapter):
    """A family whose prompt holds one placeholder token for each visual embedding, newlines between rows of patches included."""

    places: ClassVar[tuple[Places, ...]]

    def visual_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return where a placeholder of an image or a video stands, bool [batch, seq]."""
        ids: Tensor = inputs["input_ids"]
        found = torch.zeros_like(ids, dtype=torch.bool)
        for place in self.places:
            found |= ids == _token(model, place)
        return found

    def question_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the text after the last visual token of each row, bool [batch, seq]; all text of a row without any.

        Chat templates differ from checkpoint to checkpoint, so their markers count as text here. Padding does not. A question
        that was asked before the video is not found: put the video first, or compare with all text (``text="all"``).
        """
        visual = self.visual_positions(model, inputs)
        at = torch.arange(visual.shape[1], device=visual.device).expand_as(visual)
        question: Tensor = at > torch.where(visual, at, -1).amax(1, keepdim=True)
        mask = inputs.get("attention_mask")
        if mask is not None:
            question &= mask[:, -visual.shape[1] :] != 0  # a mask may also cover what a cache holds already
        return question

    def visual_embeddings(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Return what the model puts at the visual positions, [num_visual, hidden] for each row, in the embedding's dtype.

        Raises
        ------
        UnsupportedError
            For a prompt without visual tokens.
        ParameterError
            When the prompt has placeholders and a part of the processor's output is missing, or they differ in number from the
            embeddings that the model makes.
        """
        ids: Tensor = inputs["input_ids"]
        visual = self.visual_positions(model, inputs)
        weight = model.get_input_embeddings().weight
        found = weight.new_empty(int(visual.sum()), weight.shape[1])
        for place in self.places:
            at = ids[visual] == _token(model, place)
            count = int(at.sum())
            if not count and inputs.get(place.pixels) is None:
                continue
            missing = [name for name in (place.pixels, *place.needs) if inputs.get(name) is None]
            if missing:
                raise ParameterError(
                    f"the prompt has {count} places for {place.kind} tokens and the inputs have no {' and no '.join(missing)} "
                    f"(they have: {', '.join(inputs)}): pass all that the processor returned"
                )
            features = _rows(self.features(model, inputs, place)).to(found)
            if len(features) != count:
                raise ParameterError(
                    f"the prompt has {count} places for {place.kind} tokens (token {_token(model, place)}) and the "
                    f"{place.kind}s have {len(features)}: give the {place.pixels} that this prompt was made with"
                )
            found[at.to(found.device)] = features
        if not len(found):
            tokens = " or ".join(f"{place.kind}_token_id = {_token(model, place)}" for place in self.places)
            raise UnsupportedError(
                f"the prompt of {ids.shape[1]} tokens has no visual token ({tokens} is nowhere in input_ids): make input_ids "
                "with the model's processor and a video or an image, or ask without a visual method"
            )
        return list(torch.split(found, visual.sum(1).tolist()))

    def without_pixels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return `inputs` without pixels: transformers would make embeddings of them and find no place for these."""
        pixels = {place.pixels for place in self.places}
        return {name: value for name, value in inputs.items() if name not in pixels}

    def features(self, model: Any, inputs: Mapping[str, Any], place: Places) -> Any:
        """Return what the model's ``get_<kind>_features`` says: a Tensor, a list of them, or an output with ``pooler_output``."""
        given = {name: inputs[name] for name in (*place.needs, *place.takes) if inputs.get(name) is not None}
        # By position: transformers 5.17 calls LLaVA-OneVision's video pixels by another name here than in `forward`.
        return getattr(model, f"get_{place.kind}_features")(inputs[place.pixels], **given, return_dict=True)


def _token(model: Any, place: Places) -> int:
    return int(getattr(model.config, f"{place.kind}_token_id"))


def _rows(features: Any) -> Tensor:
    """Return visual features as one Tensor [num_visual, hidden]; families give a Tensor, or one for each image or video."""
    pooled = getattr(features, "pooler_output", features)
    parts = [pooled] if isinstance(pooled, Tensor) else pooled
    return torch.cat([part.flatten(0, -2) for part in parts])


def for_model(model: Any) -> Adapter:
    """Return the adapter of a transformers model.

    Raises
    ------
    UnsupportedError
        When no adapter knows its model type.
    """
    kind = getattr(model.config, "model_type", None)
    try:
        return registry.lookup("adapter", str(kind))()  # type: ignore[no-any-return]
    except UnknownNameError as error:
        raise UnsupportedError(
            f"{type(model).__name__} is of model type {kind!r}, which no adapter knows (known: {', '.join(error.known)}); "
            "write wqlab/hf/adapters/<model type>.py, or use one of the known"
        ) from error
