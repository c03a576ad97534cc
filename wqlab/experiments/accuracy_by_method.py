"""Answers behind every way to hold a cache, at the memory that each takes (WindowQuant, Table 3, on PocketBench)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.bench.accuracy import LIBRARIES
from wqlab.evals import paired
from wqlab.experiments import Experiment, Parameters, answers, gpu_records, video_prompts
from wqlab.models.shipped import POCKET_VLM, POCKET_VLM_PARTS
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

#: What is asked here when `live`: a seeded subset that two cores answer within three minutes.
LIVE_QUESTIONS, LIVE_FRAMES, LIVE_SEED = 12, 8, 1002
_QUICK_QUESTIONS = 2
#: Row of Table 3 -> method and bits; 0 where the paper does not state them.
_PRINTED = {
    "RTN (INT4)": ("rtn", 4), "RTN (INT2)": ("rtn", 2), "SmoothQuant": ("smoothquant", 0), "KIVI": ("kivi", 0), "SKVQ": ("skvq", 0),
    "WindowQuant": ("windowquant", 0),
}  # fmt: skip
_PER_TASK = ("task_accuracy", "task_accuracy_low", "task_accuracy_high", "task_kl", "task_kl_low", "task_kl_high")
_PAPER = ("paper_accuracy", "paper_difference")
#: Protocol and split that the ledger's values are about, and their suffix.
_JUDGED = {
    ("cache_then_ask", "hard"): "hard", ("cache_then_ask", "easy"): "easy", ("paper_literal", "hard"): "paper_literal",
    ("multi_turn", "hard"): "multi_turn",
}  # fmt: skip


class AccuracyByMethodParameters(Parameters):
    """Parameters of `accuracy_by_method`.

    Parameters
    ----------
    split : {"hard", "easy"}
        Of PocketBench.
    protocol : {"cache_then_ask", "paper_literal", "multi_turn"}
        What was read when the cache was quantized; the last two were recorded on the hard split.
    metric : str
        What is drawn against bits; all are in the table.
    live : bool
        Answer a seeded subset here, with short videos and a few methods, instead of reading the record.
    gpu : str
        Whose record of answers.
    """

    split: Literal["hard", "easy"] = Field("hard", description="split of PocketBench")
    protocol: Literal["cache_then_ask", "paper_literal", "multi_turn"] = Field(
        "cache_then_ask", description="what was read when the cache was quantized"
    )
    metric: Literal["accuracy", "kl", "flip_rate", "margin_difference", "accuracy_difference"] = Field(
        "kl", description="what is drawn against bits"
    )
    live: bool = Field(False, description="answer a subset here (minutes) instead of reading the record")
    gpu: str = Field("h200", description="whose record of answers")


@register("stem", "accuracy_by_method")
class AccuracyByMethod(Experiment[AccuracyByMethodParameters]):
    """Every method's answers from the same prefill, against full precision question by question."""

    stem = "accuracy_by_method"
    title = "Answers of every method at the memory that it takes"
    paper = "WindowQuant, Sect. 4.2, Table 3"
    Parameters = AccuracyByMethodParameters
    live = False

    def parts(self, parameters: AccuracyByMethodParameters) -> list[str]:
        """Return the pocket VLM's parts and the clips, where it answers here."""
        return [*POCKET_VLM_PARTS, "clips"] if parameters.live else []

    def run(self, parameters: AccuracyByMethodParameters) -> Result:
        """Compute a table of up to four parts.

        Returns
        -------
        Result
            ``part == "methods"``: per setting the columns of `wqlab.experiments.answers.summarised`. ``part == "tasks"``: per
            setting and ``task``, ``task_accuracy`` and ``task_kl`` with ``_low`` and ``_high``, 95 %. ``part == "protocols"``, of
            the record: as methods, for every ``protocol`` and ``split``. ``part == "paper"``: per ``model`` and method of Table 3,
            ``paper_accuracy``, the average over its tasks in %, and ``paper_difference`` to FP16 in points.

        Raises
        ------
        MissingPartError
            When the answers were not recorded on that GPU, or not for this protocol and split.
        """
        import pandas as pd

        p = parameters
        values: dict[str, Value] = {}
        cells, paper = gpu_records.printed("windowquant_table3")
        tables = [_printed(cells).assign(part="paper")]
        if p.live:
            count = _QUICK_QUESTIONS if p.quick else LIVE_QUESTIONS
            table, inputs, note = _answer_here(p.split, p.protocol, count)
            summary, per_task = answers.summarise_table(table), _by_task(table)
            evidence = Evidence(
                kind="measured",
                source=f"{POCKET_VLM}, PocketBench {p.split}, seed {LIVE_SEED}, {count} questions, {p.protocol}",
                hardware=environment.hardware_line(),
            )
            notes = [f"{count} questions of {LIVE_FRAMES} frames are a look, no result: the record has hundreds of 32.", note]
        else:
            record = answers.needed(p.gpu)
            split = p.split if p.protocol == "cache_then_ask" else "hard"
            summary = answers.summarised(record, group="methods", protocol=p.protocol, split=split)
            chosen = answers.rows_of(record, protocol=p.protocol, split=split)
            per_task = _by_task(chosen[chosen["setting"].isin(summary["setting"])])
            tables.append(_by_protocol(record).assign(part="protocols"))
            evidence, inputs, values = record.evidence(), [record.input()], _values(record)
            missing = [name for name in LIBRARIES if f"transformers {name}" not in set(summary["method"])]
            lacking = f"Of transformers' cache {', '.join(missing)} was not installed where this was recorded." if missing else ""
            notes = [answers.describe(record, p.protocol, split), *([lacking] if lacking else [])]
        notes += [
            "Filled: every window of the video is encoded and text is not, alike for all methods. Hollow: the method's own policy "
            "(residual window, sinks), over text too. Bits count scales, minima, positions and what stays in 16 bits.",
            "SKVQ and SmoothQuant are calibrated on four development videos; SKVQ clips at 0.92 where its paper searches per "
            "layer, and has 16-bit metadata.",
            "Table 3: averages over 11 tasks of MileBench; the bits of SmoothQuant, KIVI and SKVQ and the protocol are not stated.",
        ]
        measured = (*answers.COLUMNS, "bits_per_element", *_PER_TASK)
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=pd.concat([summary.assign(part="methods"), per_task.assign(part="tasks"), *tables], ignore_index=True),
            evidence={
                **dict.fromkeys(measured, evidence),
                **dict.fromkeys(_PAPER, Evidence(kind="paper", source="WindowQuant, Table 3, LLaVA-v1.5-7B and 13B")),
            },
            values=values,
            inputs=[*inputs, paper],
            notes=notes,
        )


def _printed(cells: dict[tuple[str, str], float]) -> pd.DataFrame:
    """Return the averages of Table 3 per model and method."""
    import pandas as pd

    full = {row.removesuffix(" FP16"): cells[row, "average"] for row, _ in cells if row.endswith(" FP16")}
    rows = [
        (model, method, bits, cells[f"{model} {row}", "average"], cells[f"{model} {row}", "average"] - before)
        for model, before in full.items()
        for row, (method, bits) in _PRINTED.items()
    ]
    return pd.DataFrame(rows, columns=["model", "method", "num_bits", *_PAPER])


def _by_protocol(record: Record) -> pd.DataFrame:
    """Return every method under every protocol and split that was recorded."""
    import pandas as pd

    return pd.concat(
        [
            answers.summarised(record, group="methods", protocol=protocol, split=split).assign(protocol=protocol, split=split)
            for protocol, split in _JUDGED
        ]
    )


def _by_task(rows: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy and KL per setting and task, from rows of answers."""
    import pandas as pd

    found = []
    for setting in rows["setting"].unique():
        each = answers.against_full(rows, setting)
        for task, mine in each.groupby("task"):
            said = {"setting": setting, **answers.described(setting), "task": task, "n": len(mine)}
            for metric in ("accuracy", "kl"):
                mean, low, high = paired.mean_interval(mine[metric], resamples=500)
                said |= {f"task_{metric}": mean, f"task_{metric}_low": low, f"task_{metric}_high": high}
            found.append(said)
    return pd.DataFrame(found)


@lru_cache(maxsize=4)
def _answer_here(split: str, protocol: str, count: int) -> tuple[pd.DataFrame, list[Input], str]:
    from wqlab.evals.scoring import PlanSetting, Setting, score_settings
    from wqlab.models import pocket

    loaded = pocket.load()
    settings = [
        Setting("rtn", 4), Setting("rtn", 2), Setting("kivi", 2), Setting("fp8", 8), Setting("skvq", 4),
        PlanSetting(normalize="none"), PlanSetting(normalize="rank"),
    ]  # fmt: skip
    table = score_settings(
        loaded, settings, protocol=protocol, split=split, seed=LIVE_SEED, limit=count, num_frames=LIVE_FRAMES, batch_size=4
    )
    return table, [*loaded.inputs, video_prompts.generator()], loaded.note


def _values(record: Record) -> dict[str, Value]:
    """Return, for the ledger, each method's accuracy, its difference to full precision, KL and bits, per protocol and split."""
    found: dict[str, tuple[float, str, str]] = {}
    for (protocol, split), suffix in _JUDGED.items():
        for row in answers.summarised(record, group="methods", protocol=protocol, split=split).to_dict("records"):
            name = f"{answers.short_name(row)}_{suffix}"
            found[f"accuracy_{name}"] = (row["accuracy"], "share", "accuracy")
            found[f"kl_{name}"] = (row["kl"], "nat", "kl")
            found[f"flip_rate_{name}"] = (row["flip_rate"], "share", "flip_rate")
            found[f"bits_{name}"] = (row["bits_per_element"], "bit", "bits_per_element")
            for end in ("", "_low", "_high"):
                found[f"gain_{name}{end}"] = (row[f"accuracy_difference{end}"], "share", f"accuracy_difference{end}")
        quantized = [r for r in answers.summarised(record, protocol=protocol, split=split).to_dict("records") if r["num_bits"] < 16]
        best = max(quantized, key=lambda row: row["accuracy_difference_low"])
        found[f"largest_sure_gain_{suffix}"] = (best["accuracy_difference_low"], "share", "accuracy_difference_low")
    return gpu_records.stated(found)
