"""LLaVA 1.5: images of one size, 576 tokens each; a video is its frames as images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wqlab.hf.adapters import PlaceholderAdapter, Places
from wqlab.registry import register


@register("adapter", "llava")
class LlavaAdapter(PlaceholderAdapter):
    """Reads positions off the image token."""

    # Only encoders that take any size of image (Pixtral) are told sizes.
    places = (Places("image", "pixel_values", takes=("image_sizes",)),)

    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int | None:
        """Return the patches of an image (576 for LLaVA 1.5); None for an encoder that takes images of any size."""
        vision = model.config.vision_config
        if vision.model_type == "pixtral":
            return None
        class_token = model.config.vision_feature_select_strategy == "full"
        return int((vision.image_size // vision.patch_size) ** 2 + class_token)
