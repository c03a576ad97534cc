"""InternVL: a video is its frames as images of one tile each, with words between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wqlab.hf.adapters import PlaceholderAdapter, Places
from wqlab.registry import register


@register("adapter", "internvl")
class InternVLAdapter(PlaceholderAdapter):
    """Reads positions off the image token. The "Frame1:" before each frame and the markers around it are text."""

    places = (Places("image", "pixel_values"),)

    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int | None:
        """Return the tokens of a tile (256 for 448 pixels); a frame of a video is one tile, an image may be several."""
        return int(model.config.image_seq_length)
