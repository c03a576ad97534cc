"""From answers to a tidy table, and from the table to what a run reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from wqlab.evals import paired
from wqlab.evals.scoring.journal import Answer
from wqlab.evals.scoring.settings import FULL, CacheSetting

_LOG_PROBS = [f"log_prob_{i}" for i in range(4)]


def to_table(answers: Iterable[Answer], settings: Sequence[CacheSetting], common: dict[str, Any]) -> pd.DataFrame:
    """Return one row per setting and question.

    Parameters
    ----------
    answers : iterable of Answer
        One or more.
    settings : sequence of CacheSetting
        Those of the answers, full precision among them.
    common : dict
        Columns that are the same in every row.

    Returns
    -------
    pandas.DataFrame
        The fields of the settings (empty where a setting has none of that name) and their label (``setting``), the common columns,
        ``index``, ``task``, ``answer``, ``chosen``, ``log_prob_0`` to ``log_prob_3``, the metrics of `paired.per_question`,
        ``bits_per_element`` (metadata included), ``bytes_held`` and ``bytes_fp16`` (of the visual tokens; of all tokens where text
        is encoded too), ``seconds``.
    """
    found = sorted(answers, key=lambda answer: answer.index)
    right = np.array([a.answer for a in found])
    full = np.array([a.log_probs[FULL] for a in found])
    tables = []
    for setting in settings:
        label = setting.label
        scores = np.array([a.log_probs[label] for a in found])
        held, elements = (np.array(x) for x in ([a.num_bytes[label] for a in found], [a.num_elements[label] for a in found]))
        columns: dict[str, Any] = {
            "setting": label,
            **{name: str(value) if isinstance(value, tuple) else value for name, value in asdict(setting).items()},  # type: ignore[call-overload]
            **common,
            "index": [a.index for a in found],
            "task": [a.task for a in found],
            "answer": right,
            "chosen": scores.argmax(1),
            **dict(zip(_LOG_PROBS, scores.T, strict=True)),
            **paired.per_question(full, scores, right),
            "bits_per_element": 8 * held / elements,
            "bytes_held": held,
            "bytes_fp16": 2 * elements,
            "seconds": [a.seconds for a in found],
        }
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def summarise_setting(table: pd.DataFrame, label: str) -> dict[str, Any]:
    """Return the metrics of one setting over all its questions, and under ``tasks`` over those of each task.

    The rows of full precision must be in the table too.
    """

    def over(chosen: pd.DataFrame) -> dict[str, Any]:
        mine, full = chosen[chosen["setting"] == label], chosen[chosen["setting"] == FULL]
        return paired.summarise(full[_LOG_PROBS].to_numpy(), mine[_LOG_PROBS].to_numpy(), mine["answer"].to_numpy())

    return {**over(table), "tasks": {str(task): over(rows) for task, rows in table.groupby("task")}}
