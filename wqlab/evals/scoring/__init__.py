"""Answering PocketBench with quantized caches.

One prefill serves all methods: `stream` holds what the model has read, `rows` puts questions and options behind it, `settings` says
how a cache is held, `run` goes through the benchmark, `journal` keeps the answers and `table` turns them into numbers.
"""

from wqlab.evals.scoring.run import evaluate, score_settings
from wqlab.evals.scoring.settings import Setting
from wqlab.evals.scoring.table import summarise_setting

__all__ = ["Setting", "evaluate", "score_settings", "summarise_setting"]
