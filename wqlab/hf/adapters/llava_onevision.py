"""LLaVA-OneVision: videos of pooled frames, and images seen whole and in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wqlab.hf.adapters import PlaceholderAdapter, Places
from wqlab.registry import register


@register("adapter", "llava_onevision")
class LlavaOnevisionAdapter(PlaceholderAdapter):
    """Reads positions off the image and the video token.

    Newlines stand under them too: after each row of a tiled image, and once, last, in a video. They count as visual.
    """

    places = (
        Places("image", "pixel_values", needs=("image_sizes",), takes=("batch_num_images",)),
        Places("video", "pixel_values_videos"),
    )

    def tokens_per_frame(self, model: Any, inputs: Mapping[str, Any] | None = None) -> int:
        """Return the tokens of a video's frame, which the model pools two by two (196 for 27 x 27 patches); no newline is in it."""
        vision = model.config.vision_config
        side = vision.image_size // vision.patch_size
        return int(((side + 1) // 2) ** 2)

    def features(self, model: Any, inputs: Mapping[str, Any], place: Places) -> Any:
        """Return what the model makes of images or videos, with the newline that ends a video."""
        features = super().features(model, inputs, place)
        if place.kind == "image":
            return features
        videos = features.pooler_output
        if videos.shape[1] == inputs[place.pixels].shape[1] * self.tokens_per_frame(model):
            # transformers 5.17 adds the newline only after this call, later releases in it.
            newline = getattr(model, "model", model).image_newline.to(videos)
            videos = torch.cat([videos, newline.expand(videos.shape[0], 1, -1)], dim=1)
        return videos
