"""Decode latency per token against the size of the KV cache: FP16, WindowQuant, and what could be gained at most (Fig. 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from wqlab.experiments import Experiment, Parameters, decode_steps
from wqlab.experiments.decode_steps import FP16, JUDGED_BATCH, JUDGED_FRAMES, PACKED
from wqlab.registry import register
from wqlab.types import Result, Value

if TYPE_CHECKING:
    import pandas as pd


class DecodeLatencyParameters(Parameters):
    """Parameters of `decode_latency`.

    Parameters
    ----------
    size : {"fp16", "held"}
        What the horizontal axis counts: the bytes that the tokens take in 16 bits, which is the same for both sides, or those that
        each side holds.
    gpu : str
        Whose record.
    """

    size: Literal["fp16", "held"] = Field("fp16", description="KV cache size in 16 bits, or as it is held")
    gpu: str = Field("h200", description="whose record of decode steps")


@register("stem", "decode_latency")
class DecodeLatency(Experiment[DecodeLatencyParameters]):
    """Steps of all batches and videos, with a line fitted through each side's."""

    stem = "decode_latency"
    title = "Decode latency per token against the size of the KV cache"
    paper = "WindowQuant, Fig. 2"
    Parameters = DecodeLatencyParameters

    def run(self, parameters: DecodeLatencyParameters) -> Result:
        """Read the record; see `DecodeLatencyParameters`."""
        record = decode_steps.recorded(parameters.gpu)
        data = decode_steps.steps(record)
        data.insert(0, "size_gb", data["kv_fp16_gb" if parameters.size == "fp16" else "kv_gb"])
        measured = record.evidence()
        names = ("latency_ms", "p10_ms", "p90_ms", "attention_ms", "weight_floor_ms", "speedup", "ceiling", "ceiling_weights")
        plain = decode_steps.steps(record, plain=True)
        notes = decode_steps.notes(record)
        notes.append("Lines are least-squares fits. Ceiling: the speed-up if attention cost nothing.")
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=data,
            evidence=dict.fromkeys((*names, "tokens_per_s", "kv_gb", "peak_memory_gb"), measured),
            values=_values(data, plain),
            inputs=[record.input()],
            notes=notes,
        )


def fit(sizes: pd.Series[float], latencies: pd.Series[float]) -> tuple[float, float, float]:
    """Return slope, intercept and R^2 of a line; NaN for fewer than three sizes."""
    if sizes.nunique() < 3:
        return np.nan, np.nan, np.nan
    slope, intercept = np.polyfit(sizes, latencies, 1)
    rest = latencies - (slope * sizes + intercept)
    return float(slope), float(intercept), float(1 - rest.var(ddof=0) / latencies.var(ddof=0))


def _values(data: pd.DataFrame, plain: pd.DataFrame) -> dict[str, Value]:
    """Return the numbers for the ledger; those that the record lacks are left out."""
    found: dict[str, tuple[float, str, str]] = {}
    for method in (FP16, PACKED):
        rows = data[data["method"] == method]
        slope, intercept, r_squared = fit(rows["kv_fp16_gb"], rows["latency_ms"])
        found[f"{method}_r_squared"] = (r_squared, "1", "latency_ms")
        found[f"{method}_ms_per_gb"] = (slope, "ms/GB", "latency_ms")
        found[f"{method}_without_kv_ms"] = (intercept, "ms", "latency_ms")

    def state(name: str, rows: pd.DataFrame, column: str, unit: str = "ratio") -> None:
        for value in rows[column].head(1):
            found[name] = (float(value), unit, column if column != "batch" else "speedup")

    for suffix, table in (("", data), ("_transformers", plain)):
        at = (table["batch"] == JUDGED_BATCH) & (table["frames"] == JUDGED_FRAMES) & (table["method"] == PACKED)
        state(f"speedup{suffix}", table[at], "speedup")
        state(f"ceiling{suffix}", table[at], "ceiling")
        state(f"ceiling_weights{suffix}", table[at], "ceiling_weights")
    best = data[data["method"] == PACKED].nlargest(1, "speedup")
    state("largest_speedup", best, "speedup")
    state("largest_speedup_batch", best, "batch", "requests")
    state("largest_speedup_ceiling", best, "ceiling")
    packed = data[(data["method"] == PACKED) & (data["frames"] == JUDGED_FRAMES)]
    for batch, speedup in zip(packed["batch"], packed["speedup"], strict=True):
        found[f"speedup_batch_{batch}"] = (float(speedup), "ratio", "speedup")
    return decode_steps.stated(found)
