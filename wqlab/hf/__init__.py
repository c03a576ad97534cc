"""The bridge to transformers. Importing this package costs nothing: names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wqlab.hf.attention import packed_attention
    from wqlab.hf.cache import QuantizedKVCache, QuantizedKVLayer, cache_argument
    from wqlab.hf.kv_codebooks import learn_codebooks
    from wqlab.hf.linears import collect_stats, quantize_linears
    from wqlab.hf.rotary import watch_rotary
    from wqlab.hf.side_by_side import SideBySideCache
    from wqlab.hf.window_cache import WindowQuantCache, windowquant

_HOMES = {"QuantizedKVCache": "cache", "QuantizedKVLayer": "cache", "cache_argument": "cache", "SideBySideCache": "side_by_side"}
_HOMES |= {"WindowQuantCache": "window_cache", "windowquant": "window_cache", "packed_attention": "attention"}
_HOMES |= {"learn_codebooks": "kv_codebooks", "watch_rotary": "rotary", "collect_stats": "linears", "quantize_linears": "linears"}

__all__ = [
    "QuantizedKVCache", "QuantizedKVLayer", "SideBySideCache", "WindowQuantCache", "cache_argument", "collect_stats",
    "learn_codebooks", "packed_attention", "quantize_linears", "watch_rotary", "windowquant",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"wqlab.hf.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'wqlab.hf' has no attribute {name!r}")
