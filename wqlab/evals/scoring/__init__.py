"""Answering PocketBench with quantized caches.

One prefill serves all methods: `stream` holds what the model has read, `rows` puts questions and options behind it. `settings` says
how a cache is held (`plans` and `library` are more of them, `choose` finds one by name), `batch` is what it may know of the videos,
`facts` of the model. `run` goes through the benchmark, `journal` keeps the answers and `table` turns them into numbers.
"""

from wqlab.evals.scoring.choose import choose_setting
from wqlab.evals.scoring.library import TransformersSetting
from wqlab.evals.scoring.plans import PlanSetting
from wqlab.evals.scoring.run import evaluate, find_device, read_videos, score_settings
from wqlab.evals.scoring.settings import CacheSetting, Exam, Setting
from wqlab.evals.scoring.show import render
from wqlab.evals.scoring.table import summarise_setting

__all__ = [
    "CacheSetting",
    "Exam",
    "PlanSetting",
    "Setting",
    "TransformersSetting",
    "choose_setting",
    "evaluate",
    "find_device",
    "read_videos",
    "render",
    "score_settings",
    "summarise_setting",
]
