"""How well scorers find the windows that answer, and what their plans cost: two records as figures read them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from wqlab.bench.premise_audit import BEST, EARLY, FRESH
from wqlab.errors import MissingPartError
from wqlab.evals import paired
from wqlab.evals.premise import ALL_LAYERS, LAYER
from wqlab.experiments import answers, gpu_records

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

RECORD = "premise_audit"
FRAMES = (32, 100)
#: Scorer as the audit calls it -> its key in tables and values, and its name in a figure.
SCORERS = {
    "cosine": ("cosine", "cosine (Eq. 8)"), "pearson": ("pearson", "Pearson"), "euclidean": ("euclidean", "Euclidean"),
    "random": ("random", "random scores"), EARLY: ("attention_early", "attention, early layers"),
    ALL_LAYERS: ("attention_all", "attention, all layers"), BEST: ("attention_best", "attention, best layers"),
}  # fmt: skip
#: Plans that no scorer makes.
ORDERS = {
    "permuted_0": "cosine's widths, shuffled", "permuted_1": "the same, shuffled again",
    "truth": "knows the answer's windows", "inverse": "the opposite of that",
}  # fmt: skip
NAMES = {**dict(SCORERS.values()), **ORDERS}
#: Columns of each table that are measured.
AUDITED = (*(name + end for name in ("auc", "precision", "gain") for end in ("", "_low", "_high")), "base_rate")
ANSWERED = ("bits_per_element", "accuracy_fp16", *(name + end for name in ("kl", "accuracy") for end in ("", "_low", "_high")))
CHANGES = tuple(name + end for name in ("kl_change", "accuracy_change") for end in ("", "_low", "_high"))
#: The plans that differences are taken to.
_AGAINST = ("cosine", "random")


class Records(NamedTuple):
    """The audit and the answers of one GPU."""

    audit: Record
    answers: Record


def needed(gpu: str) -> Records:
    """Return both records.

    Raises
    ------
    UnknownNameError
        For a GPU key that does not exist.
    MissingPartError
        When one was not measured there; says how to get it.
    """
    found = gpu_records.find(RECORD, gpu)
    if found is None:
        raise MissingPartError(f"there is no audit of scorers on {gpu}: {gpu_records.how_to_get(RECORD, gpu)}")
    return Records(found, answers.needed(gpu))


def audited(records: Records) -> pd.DataFrame:
    """Return one row per split and scorer: ``scorer`` (its key), ``layers``, ``n``, and `AUDITED` over the questions.

    ``auc``, ``precision`` and ``gain`` have the limits of their 95 % bootstrap intervals. ``base_rate`` is the precision of chance,
    ``gain`` what a question's precision is above its own base rate: a scorer can rank by chance and still be right at its top.
    """
    return _audited(_Frame(records.audit)).copy()


def by_layer(records: Records) -> pd.DataFrame:
    """Return one row per stream (``stream``), split and layer: ``n``, and ``auc`` of its attention.

    Fresh questions have its interval too, ``auc_low`` and ``auc_high``.
    """
    return _by_layer(_Frame(records.audit)).copy()


def by_task(records: Records) -> pd.DataFrame:
    """Return one row per split, task and scorer: mean ``auc`` and ``n``."""
    data = _fresh(records.audit.data)
    groups = data.groupby(["split", "task", "scorer"], as_index=False)
    return groups.agg(auc=("auc", "mean"), n=("auc", "size"))


def plans(records: Records, split: str) -> pd.DataFrame:
    """Return one row per number of frames and plan (``plan``, a key of `NAMES`).

    All are WindowQuant's with ``rank`` and alpha 2, which gives every scorer the same memory up to rounding.

    Returns
    -------
    pandas.DataFrame
        ``split``, ``num_frames``, ``plan``, ``setting`` (its label in the record), ``n`` and `ANSWERED`.
    """
    return _plans(_Frame(records.audit), _Frame(records.answers), split)[0].copy()


def differences(records: Records, split: str) -> pd.DataFrame:
    """Return `plans`, question by question, against another one (``against``): `CHANGES`, and ``n``; a negative KL is better."""
    return _plans(_Frame(records.audit), _Frame(records.answers), split)[1].copy()


def verdict(low: float, high: float, less: str, more: str, neither: str) -> str:
    """Return which of three words an interval around a difference allows."""
    return less if high < 0 else more if low > 0 else neither


class _Frame:
    """A record that is the same for a cache when its checksum is."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def __hash__(self) -> int:
        return hash(self.record.provenance["sha256"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frame) and self.record.provenance["sha256"] == other.record.provenance["sha256"]


def _fresh(data: pd.DataFrame) -> pd.DataFrame:
    """Return the reported rows of the scorers in `SCORERS`, by their keys."""
    rows = data[(data["part"] == FRESH) & data["scorer"].isin(SCORERS)]
    return rows.assign(scorer=rows["scorer"].map({name: key for name, (key, _) in SCORERS.items()}))


@functools.lru_cache(maxsize=4)
def _audited(frame: _Frame) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for (split, key), part in _fresh(frame.record.data).groupby(["split", "scorer"]):
        layers = part["layers"].iloc[0]
        row = {"split": split, "scorer": key, "layers": layers if isinstance(layers, str) else "", "n": len(part)}
        for name in ("auc", "precision"):
            row |= _interval(name, part[name])
        row |= _interval("gain", part["precision"] - part["base_rate"])
        rows.append({**row, "base_rate": float(part["base_rate"].mean())})
    return pd.DataFrame(rows)


@functools.lru_cache(maxsize=4)
def _by_layer(frame: _Frame) -> pd.DataFrame:
    import pandas as pd

    data = frame.record.data
    groups = data[data["scorer"] == LAYER].groupby(["part", "split", "layers"])
    rows = [
        {
            "stream": part, "split": split, "layer": int(str(layer)), "n": len(rows),
            **(_interval("auc", rows["auc"]) if part == FRESH else {"auc": float(rows["auc"].mean())}),
        }
        for (part, split, layer), rows in groups
    ]  # fmt: skip
    return pd.DataFrame(rows).sort_values(["stream", "split", "layer"], ignore_index=True)


@functools.lru_cache(maxsize=8)
def _plans(audit: _Frame, answered: _Frame, split: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    import pandas as pd

    layers = _audited(audit).drop_duplicates("scorer").set_index("scorer")["layers"]
    rows, changes = [], []
    for frames in FRAMES:
        asked = answers.rows_of(answered.record, split=split, num_frames=frames)
        labels = {_plan(label, layers): label for label in asked["setting"].unique()}
        each = {key: answers.against_full(asked, labels[key]) for key in NAMES if key in labels}
        for key, mine in each.items():
            which = {"split": split, "num_frames": frames, "plan": key, "n": len(mine)}
            rows.append(
                {
                    **which, "setting": labels[key], "bits_per_element": float(mine["bits_per_element"].mean()),
                    "accuracy_fp16": float(mine["accuracy_fp16"].mean()), **_interval("kl", mine["kl"]),
                    **_interval("accuracy", mine["accuracy"]),
                }
            )  # fmt: skip
            changes += [
                {
                    **which, "against": other, **_interval("kl_change", mine["kl"] - each[other]["kl"]),
                    **_interval("accuracy_change", mine["accuracy"] - each[other]["accuracy"]),
                }
                for other in _AGAINST if other in each and other != key
            ]  # fmt: skip
    if not rows:
        raise MissingPartError(f"the record {answered.record.path} holds no answers to {split} questions under rank and alpha 2")
    return pd.DataFrame(rows), pd.DataFrame(changes)


def _plan(label: str, layers: pd.Series) -> str:
    """Return the key of a setting's plan, or an empty string for a setting that is none of `NAMES`."""
    said = answers.described(label)
    ours = said["method"] == "windowquant" and said["normalize"] == "rank" and said["alpha"] == 2
    if not (ours and said["granularity"] == "window_channel" and said["first_window"]):
        return ""
    if said["order"] != "plan":
        return f"permuted_{said['seed']}" if said["order"] == "permuted" else str(said["order"])
    # The layers that the audit chose are those that the plans were made from.
    found = {f"attention({layers[key].replace(' ', ',')})": key for key in ("attention_early", "attention_best") if key in layers}
    return found.get(said["scorer"], str(said["scorer"]))


def _interval(name: str, values: pd.Series) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), paired.mean_interval(values), strict=True))
