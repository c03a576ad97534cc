"""LLaVA-NeXT (LLaVA 1.6): an image is seen whole and in tiles, so its tokens depend on its size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wqlab.hf.adapters import PlaceholderAdapter, Places
from wqlab.registry import register


@register("adapter", "llava_next")
class LlavaNextAdapter(PlaceholderAdapter):
    """Reads positions off the image token. The newline that ends each row of patches stands under one too and counts as visual."""

    places = (Places("image", "pixel_values", needs=("image_sizes",)),)

    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int | None:
        """Return the tokens of one image when all images of `inputs` have one size, newlines included; else None."""
        sizes = None if inputs is None else inputs.get("image_sizes")
        if inputs is None or sizes is None or len({(int(height), int(width)) for height, width in sizes}) != 1:
            return None
        return int(self.visual_positions(model, inputs).sum()) // len(sizes)
