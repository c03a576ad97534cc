"""wqlab: KV-cache quantization for LLM inference, two papers reproduced, with the evidence for every number.

The names below are loaded when first used, so that ``import wqlab`` stays fast.

==================  ===========================================================================
`run`               parameters of a stem -> its tidy table with evidence
`draw`              that result -> a matplotlib figure
`save`              figure -> SVG, PNG, CSV and a sidecar JSON
`explore`           a stem -> its figure with sliders, in a notebook
`parameters`        a notebook's variables -> the validated parameters of its stem
`load`              a model by name, folder or hub id -> model and tokenizer
`QuantizedKVCache`  a packed KV cache for transformers' ``generate``
`windowquant`       a block in which a video-language model's ``generate`` plans and holds its cache as WindowQuant does
`WindowQuantCache`  its cache, for a plan of your own
`perplexity`        of a model that reads its own quantized cache
==================  ===========================================================================
"""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wqlab.batch.notebooks import parameters
    from wqlab.batch.save import save
    from wqlab.evals.perplexity import perplexity
    from wqlab.experiments import run
    from wqlab.figures import draw
    from wqlab.hf.cache import QuantizedKVCache
    from wqlab.hf.window_cache import WindowQuantCache, windowquant
    from wqlab.models import load
    from wqlab.widgets.explore import explore

__version__ = _version("wqlab")

_LAZY = {
    "QuantizedKVCache": "wqlab.hf.cache",
    "WindowQuantCache": "wqlab.hf.window_cache",
    "draw": "wqlab.figures",
    "explore": "wqlab.widgets.explore",
    "load": "wqlab.models",
    "parameters": "wqlab.batch.notebooks",
    "perplexity": "wqlab.evals.perplexity",
    "run": "wqlab.experiments",
    "save": "wqlab.batch.save",
    "windowquant": "wqlab.hf.window_cache",
}

__all__ = [
    "QuantizedKVCache", "WindowQuantCache", "draw", "explore", "load", "parameters", "perplexity", "run", "save", "windowquant",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'wqlab' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
