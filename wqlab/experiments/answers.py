"""The record of answers as figures read it: per setting, the metrics against full precision with intervals over the questions."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from wqlab.evals import paired
from wqlab.experiments import gpu_records
from wqlab.types import Evidence

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

RECORD, FULL = "accuracy", "fp16"
FRESH, DEVELOPMENT = "fresh", "development"
METRICS = ("accuracy", "accuracy_difference", "kl", "flip_rate", "margin_difference")
#: Columns of `summarised` that are measured.
COLUMNS = ("accuracy_fp16", *(name for metric in METRICS for name in (metric, f"{metric}_low", f"{metric}_high")))
#: What each metric is, and its factor and unit on an axis.
AXES = {
    "accuracy": ("accuracy", 100, "%"),
    "accuracy_difference": ("accuracy against FP16", 100, "points"),
    "kl": ("KL to FP16", 1, "nats"),
    "flip_rate": ("answers that change", 100, "%"),
    "margin_difference": ("margin against FP16", 1, "nats"),
}
_LOG_PROBS = [f"log_prob_{i}" for i in range(4)]
_GRANULARITIES = ("window_channel", "window_head", "window")


def find(gpu: str) -> Record | None:
    """Return the record, or None where nobody measured it; raises UnknownNameError for a GPU key that does not exist."""
    return gpu_records.find(RECORD, gpu)


def summarised(
    record: Record,
    *,
    group: str | None = None,
    protocol: str = "cache_then_ask",
    split: str = "hard",
    num_frames: int = 32,
    part: str = FRESH,
    task: str | None = None,
) -> pd.DataFrame:
    """Return one row per setting that answered these questions, full precision first.

    Parameters
    ----------
    record : Record
        Of `find`.
    group : str, optional
        Of settings: one of `wqlab.bench.accuracy.GROUPS`. Default: all.
    protocol, split, num_frames, part
        Which questions.
    task : str, optional
        Only those of one task. Default: all.

    Returns
    -------
    pandas.DataFrame
        ``setting`` and what it says (`described`), ``n``, ``bits_per_element``, ``accuracy_fp16``, and each of `METRICS` with
        ``_low`` and ``_high``, the limits of its 95 % interval, paired over the questions.
    """
    found = _table(record.path, record.provenance["sha256"])
    keys = (part, protocol, split, num_frames, task or "")
    return found(keys, group).copy()


def tasks(record: Record) -> list[str]:
    """Return the task types of the questions, sorted."""
    return sorted(record.data["task"].unique())


def described(setting: str) -> dict[str, Any]:
    """Return what a setting's label says.

    Returns
    -------
    dict
        ``method`` (fp16, a quantizer, windowquant, or transformers and its backend), ``num_bits`` (16 for full precision, 0 for a
        plan), ``granularity``, ``policy`` (span or published), ``scorer``, ``normalize``, ``order``, ``seed``, ``first_window``.
    """
    words = setting.split()
    said: dict[str, Any] = {
        "method": words[0], "num_bits": 0, "granularity": "window_channel", "policy": "span", "scorer": "", "normalize": "",
        "order": "", "seed": 0, "first_window": True, "alpha": float("nan"),
    }  # fmt: skip
    if words[0] == FULL:
        return said | {"num_bits": 16, "granularity": ""}
    said["granularity"] = next((word for word in words if word in _GRANULARITIES), "window_channel")
    if words[0] == "windowquant":
        order = re.search(r" (permuted|truth|inverse) (\d+)", setting)
        said |= {"scorer": words[1], "normalize": words[2], "alpha": float(words[4]), "order": order[1] if order else "plan"}
        return said | {"seed": int(order[2]) if order else 0, "first_window": "no first window" not in setting}
    if words[0] == "transformers":
        said |= {"method": " ".join(words[:2]), "granularity": "", "policy": "published"}
    said["num_bits"] = int(next(word for word in words if re.fullmatch(r"int\d+", word))[3:])
    return said | ({"policy": "published"} if words[-1] == "published" else {})


def describe(record: Record, protocol: str, split: str, num_frames: int = 32, part: str = FRESH) -> str:
    """Return, for a note, what the answers are about."""
    rows = _chosen(record.data, (part, protocol, split, num_frames, ""))
    return (
        f"Answers: pocket VLM, PocketBench {split}, {rows['index'].nunique()} questions of a {part} stream, {num_frames} frames, "
        f"protocol {protocol}, 95 % intervals paired over the questions."
    )


def evidence(record: Record) -> dict[str, Evidence]:
    """Return the evidence of every measured column of `summarised`."""
    return dict.fromkeys((*COLUMNS, "bits_per_element"), record.evidence())


def _chosen(data: pd.DataFrame, keys: tuple[str, str, str, int, str]) -> pd.DataFrame:
    part, protocol, split, num_frames, task = keys
    wanted = (data["part"] == part) & (data["protocol"] == protocol) & (data["split"] == split)
    wanted &= data["num_frames"] == num_frames
    return data[wanted & (data["task"] == task)] if task else data[wanted]


@functools.lru_cache(maxsize=4)
def _table(path: Any, sha256: str) -> Any:
    """Return a function from questions to their summary, which computes each setting of each kind of question once."""
    import pandas as pd

    from wqlab import records

    data = records.read(RECORD, path.parent.name, path.parent.parent).data

    @functools.lru_cache(maxsize=512)
    def of(keys: tuple[str, str, str, int, str], setting: str) -> dict[str, Any]:
        rows = _chosen(data, keys)
        # A setting of several runs over the same questions answers alike; the first counts.
        full = rows[rows["setting"] == FULL].drop_duplicates("index").set_index("index")
        mine = rows[rows["setting"] == setting].drop_duplicates("index").set_index("index")
        found = paired.summarise(full.loc[mine.index, _LOG_PROBS], mine[_LOG_PROBS], mine["answer"])
        said = {"setting": setting, **described(setting), "n": found["n"], "accuracy_fp16": found["accuracy_fp16"]}
        said["bits_per_element"] = float(mine["bits_per_element"].mean())
        for metric in METRICS:
            low, high = found[f"{metric}_interval"]
            said |= {metric: found[metric], f"{metric}_low": low, f"{metric}_high": high}
        return said

    def select(keys: tuple[str, str, str, int, str], group: str | None) -> pd.DataFrame:
        rows = _chosen(data, keys)
        if group is not None:
            rows = rows[rows["groups"].str.contains(group[0])]
        return pd.DataFrame([of(keys, setting) for setting in rows["setting"].unique()])

    return select
