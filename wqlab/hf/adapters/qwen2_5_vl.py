"""Qwen2.5-VL: another encoder than Qwen2-VL's, the same prompt."""

from __future__ import annotations

from wqlab.hf.adapters.qwen2_vl import Qwen2VLAdapter
from wqlab.registry import register


@register("adapter", "qwen2_5_vl")
class Qwen25VLAdapter(Qwen2VLAdapter):
    """Reads positions off the image and the video token; the markers around a video are text."""
