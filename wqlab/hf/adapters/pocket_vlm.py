"""The pocket VLM: 64 visual tokens a frame, each under one placeholder token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wqlab.hf.adapters import PlaceholderAdapter, Places
from wqlab.registry import register

#: "<|im_start|>", "user" and a newline open a turn; a newline closes a video.
_OPENING, _CLOSING = 3, 1


@register("adapter", "pocket_vlm")
class PocketVLMAdapter(PlaceholderAdapter):
    """Reads positions off the placeholder token and the chat's two markers."""

    places = (Places("video", "pixel_values_videos"),)

    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int:
        """Return 64."""
        return int(model.config.num_patches)

    def question_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the words of the last turn of a prompt that ends where the answer begins, bool [batch, seq].

        They lie before the last ``<|im_end|>`` and after what comes last before it: the opening of a turn, or a video. Without
        ``<|im_end|>`` they reach to the end.
        """
        ids: Tensor = inputs["input_ids"]
        text = model.config.text_config
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        read = inputs.get("attention_mask", torch.ones_like(ids)) != 0  # <|im_end|> is the padding too
        end = torch.where((ids == text.eos_token_id) & read, at, -1).amax(1, keepdim=True)
        end = torch.where(end < 0, ids.shape[1], end)
        opened = torch.where((ids == text.bos_token_id) & (at < end), at + _OPENING, 0).amax(1, keepdim=True)
        seen = torch.where(self.visual_positions(model, inputs) & (at < end), at + 1 + _CLOSING, 0).amax(1, keepdim=True)
        positions: Tensor = (at >= torch.maximum(opened, seen)) & (at < end) & read
        return positions

    def features(self, model: Any, inputs: Mapping[str, Any], place: Places) -> Tensor:
        """Return the projector's output, [videos, num_visual, hidden]."""
        features: Tensor = model.get_video_features(inputs[place.pixels])
        return features
