"""The record of whole decode steps (``wqlab bench decode_step``), as two figures read it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from wqlab import records
from wqlab.errors import MissingPartError, UnknownNameError
from wqlab.types import Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

FP16, PACKED = "fp16", "windowquant"
SAME, LARGEST, PLAIN = "same batch", "largest batch", "transformers"
#: The point that the figures' values are about: rows and frames.
JUDGED_BATCH, JUDGED_FRAMES = 8, 100


@lru_cache(maxsize=4)
def recorded(gpu: str) -> Record:
    """Return the record of a GPU.

    Raises
    ------
    UnknownNameError
        For a GPU key that does not exist.
    MissingPartError
        When nobody measured it there yet; says how.
    """
    try:
        return records.read("decode_step", gpu)
    except UnknownNameError as error:
        if error.kind == "GPU":
            raise
        raise MissingPartError(
            f"there is no record of decode steps on {gpu}: take data/recorded/{gpu}/decode_step.* from the project's repository, "
            "or measure them on such a GPU, in about three minutes: wqlab bench decode_step"
        ) from error


def steps(record: Record, case: str = SAME, plain: bool = False) -> pd.DataFrame:
    """Return the steps of a case that were measured, with times in ms and sizes in GB (10^9 bytes).

    Parameters
    ----------
    record : Record
        From `recorded`.
    case : {"same batch", "largest batch"}
        Whether both sides have one batch, or each its largest.
    plain : bool
        Those of the model's classes as they are, instead of fused layers.

    Raises
    ------
    MissingPartError
        When both sides lack a time at every point.
    """
    import pandas as pd

    data = record.data
    chosen = (data["case"] == case) & ((data["layers"] == PLAIN) == plain) & data["step_us"].notna()
    found = data[chosen].sort_values(["frames", "batch", "method"], ignore_index=True)
    if case == SAME and not plain and set(found["method"]) != {FP16, PACKED}:
        raise MissingPartError(
            f"the record of decode steps on {record.gpu} has no time of {' and '.join({FP16, PACKED} - set(found['method']))}: its "
            "column note says why; measure again with wqlab bench decode_step"
        )
    result = pd.DataFrame(
        {
            "method": found["method"], "batch": found["batch"].astype(int), "frames": found["frames"].astype(int),
            "latency_ms": found["step_us"] / 1e3, "p10_ms": found["p10_us"] / 1e3, "p90_ms": found["p90_us"] / 1e3,
            "attention_ms": found["num_layers"].astype(float) * found["attention_us"] / 1e3,
            "tokens_per_s": found["tokens_per_s"], "speedup": found["speedup"], "ceiling": found["ceiling"],
            "ceiling_weights": found["ceiling_weights"], "weight_floor_ms": found["weight_floor_us"] / 1e3,
            "kv_gb": found["kv_bytes"].astype(float) / 1e9,
            "peak_memory_gb": found["peak_memory_bytes"].astype("Float64").astype(float) / 1e9,
            "backend": found["backend"].astype(str),
        }
    )  # fmt: skip
    # What the same video takes in 16 bits: the common measure of both sides.
    full = result[result["method"] == FP16].set_index(["frames", "batch"])["kv_gb"]
    per_token = (result[result["method"] == FP16]["kv_gb"] / result["batch"] / result["frames"]).median()
    keys = list(zip(result["frames"], result["batch"], strict=True))
    result["kv_fp16_gb"] = [full.get(key, per_token * key[0] * key[1]) for key in keys]
    return result


def stated(found: dict[str, tuple[float, str, str]]) -> dict[str, Value]:
    """Return name -> (number, unit, column) as values of a result, without those that are not finite."""
    return {name: Value(*entry) for name, entry in found.items() if math.isfinite(entry[0])}


def notes(record: Record) -> list[str]:
    """Return what a reader of a decode step must know, and what is missing in the record."""
    data = record.data
    model, mix = data["model"].iloc[0], next(iter(data.loc[data["method"] == PACKED, "mix"]), "")
    said = [
        f"Language model of {model}, random weights, which change no latency; one CUDA graph per step, the same kernels on both "
        f"sides but for cache and attention; {mix} % of the windows in 16/4/2 bits; the encoder of images is not part of it."
    ]
    failed = data[data["step_us"].isna()]
    if len(failed):
        points = ", ".join(sorted({f"{row.method} {row.case} {row.frames} frames" for row in failed.itertuples()}))
        said.append(f"Without a time in the record: {points}.")
    if data["layers"].astype(str).str.contains("eager").any():
        said.append("Elementwise chains were not compiled, on neither side.")
    return said
