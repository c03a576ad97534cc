"""The record of answers as figures read it: per setting, the metrics against full precision with intervals over the questions."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from wqlab.bench.premise_audit import FRESH
from wqlab.errors import MissingPartError
from wqlab.evals import paired
from wqlab.experiments import gpu_records
from wqlab.types import Evidence

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

RECORD, FULL = "accuracy", "fp16"
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


def needed(gpu: str) -> Record:
    """Return the record.

    Raises
    ------
    UnknownNameError
        For a GPU key that does not exist.
    MissingPartError
        When nobody measured it there; says how to get one.
    """
    record = find(gpu)
    if record is None:
        raise MissingPartError(f"there is no record of answers on {gpu}: {gpu_records.how_to_get(RECORD, gpu)}")
    return record


def rows_of(
    record: Record, *, protocol: str = "cache_then_ask", split: str = "hard", num_frames: int = 32, part: str = FRESH
) -> pd.DataFrame:
    """Return the record's rows of these questions; parameters are those of `summarised`."""
    return _chosen(record.data, (part, protocol, split, num_frames, ""))


def per_question(record: Record, setting: str, **which: Any) -> pd.DataFrame:
    """Return `against_full` of a setting, by its label; `which` are those of `rows_of`."""
    return against_full(rows_of(record, **which), setting)


def against_full(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Return `wqlab.evals.paired.per_question` of a setting, and ``task`` and ``bits_per_element``, one row per question, by index.

    Parameters
    ----------
    rows : pandas.DataFrame
        Of answers, full precision among them.
    setting : str
        Its label.
    """
    return _against(*(_by_question(rows[rows["setting"] == name]) for name in (FULL, setting)))


def summarise_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `summarised` of answers that come from no record, such as those of `wqlab.evals.scoring.score_settings`."""
    import pandas as pd

    return pd.DataFrame([_summary(against_full(rows, setting), setting) for setting in rows["setting"].unique()])


def short_name(row: Any) -> str:
    """Return a setting's key in a figure's values, for example ``"kivi_int2_published"`` or ``"windowquant_rank"``."""
    if row["method"] == FULL:
        return FULL
    if row["method"] == "windowquant":
        return f"windowquant_{row['normalize']}"
    name = f"{row['method'].replace(' ', '_')}_int{row['num_bits']}"
    return name + ("_published" if row["policy"] == "published" and row["method"] in ("kivi", "skvq") else "")


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
    summary: pd.DataFrame = found(keys, group)
    return summary


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
    words = setting.replace(" no first window", "").split()
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


def _by_question(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a setting's rows by index; where it ran twice over the same questions it answers alike, and the first counts."""
    return rows.drop_duplicates("index").set_index("index")


def _against(full: pd.DataFrame, mine: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    found = paired.per_question(full.loc[mine.index, _LOG_PROBS], mine[_LOG_PROBS], mine["answer"])
    return pd.DataFrame(
        {**found, "task": mine["task"], "bits_per_element": mine["bits_per_element"]}, index=mine.index
    ).sort_index()


def _summary(each: pd.DataFrame, setting: str) -> dict[str, Any]:
    """Return a row of `summarised` from `against_full`."""
    said = {"setting": setting, **described(setting), "n": len(each), "accuracy_fp16": float(each["accuracy_fp16"].mean())}
    said["bits_per_element"] = float(each["bits_per_element"].mean())
    for metric in METRICS:
        mean, low, high = paired.mean_interval(each[metric])
        said |= {metric: mean, f"{metric}_low": low, f"{metric}_high": high}
    return said


@functools.lru_cache(maxsize=4)
def _table(path: Any, sha256: str) -> Any:
    """Return a function from questions to their summary, which computes each setting of each kind of question once."""
    import pandas as pd

    from wqlab import records

    data = records.read(RECORD, path.parent.name, path.parent.parent).data

    @functools.lru_cache(maxsize=32)
    def asked(keys: tuple[str, str, str, int, str]) -> dict[str, pd.DataFrame]:
        return {str(setting): _by_question(rows) for setting, rows in _chosen(data, keys).groupby("setting", sort=False)}

    @functools.lru_cache(maxsize=512)
    def of(keys: tuple[str, str, str, int, str], setting: str) -> dict[str, Any]:
        rows = asked(keys)
        return _summary(_against(rows[FULL], rows[setting]), setting)

    def select(keys: tuple[str, str, str, int, str], group: str | None) -> pd.DataFrame:
        rows = asked(keys)
        return pd.DataFrame([of(keys, name) for name, mine in rows.items() if group is None or group[0] in mine["groups"].iloc[0]])

    return select
