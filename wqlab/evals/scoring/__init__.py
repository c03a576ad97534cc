"""Answering PocketBench with quantized caches.

One prefill serves all methods: `stream` holds what the model has read, `rows` puts questions and options behind it, `settings` says
how a cache is held, `run` goes through the benchmark, `journal` keeps the answers and `table` turns them into numbers.
"""

from wqlab.evals.scoring.run import evaluate, find_device, score_settings
from wqlab.evals.scoring.settings import Exam, Setting
from wqlab.evals.scoring.show import render
from wqlab.evals.scoring.table import summarise_setting

__all__ = ["Exam", "Setting", "evaluate", "find_device", "render", "score_settings", "summarise_setting"]
