"""Qwen2-VL: images and videos of any size; two frames of a video make one step of its grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wqlab.hf.adapters import PlaceholderAdapter, Places
from wqlab.registry import register


@register("adapter", "qwen2_vl")
class Qwen2VLAdapter(PlaceholderAdapter):
    """Reads positions off the image and the video token; the markers around a video are text."""

    places = (
        Places("image", "pixel_values", needs=("image_grid_thw",)),
        Places("video", "pixel_values_videos", needs=("video_grid_thw",)),
    )

    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int | None:
        """Return the tokens of one step of the grid when all videos (without any: images) of `inputs` have one size; else None."""
        grids = [None if inputs is None else inputs.get(name) for name in ("video_grid_thw", "image_grid_thw")]
        grid = grids[1] if grids[0] is None else grids[0]
        merged = model.config.vision_config.spatial_merge_size**2
        sizes = set() if grid is None else {int(height * width) // merged for _, height, width in grid}
        return sizes.pop() if len(sizes) == 1 else None
