"""The bridge to transformers. Importing this package costs nothing: names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wqlab.hf.cache import QuantizedKVCache, QuantizedKVLayer, cache_argument
    from wqlab.hf.side_by_side import SideBySideCache

_HOMES = {"QuantizedKVCache": "cache", "QuantizedKVLayer": "cache", "cache_argument": "cache", "SideBySideCache": "side_by_side"}

__all__ = ["QuantizedKVCache", "QuantizedKVLayer", "SideBySideCache", "cache_argument"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"wqlab.hf.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'wqlab.hf' has no attribute {name!r}")
