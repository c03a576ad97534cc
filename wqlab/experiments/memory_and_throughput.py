"""Memory and throughput against batch and frames, the largest batches, and search time (Tables 4-6 and 8, Fig. 10-12).

Our copy of the paper lacks Tables 4 to 6 and Figures 10 to 12. Table 8 prints memory and throughput at one point: it is compared.
"""

from __future__ import annotations

import csv
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import Field

from wqlab import paths, records
from wqlab.errors import UnknownNameError
from wqlab.experiments import Experiment, Parameters, decode_steps
from wqlab.experiments.decode_steps import FP16, JUDGED_BATCH, JUDGED_FRAMES, LARGEST, PACKED
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from wqlab.records import Record

#: The point of Table 8.
TABLE8_BATCH, TABLE8_FRAMES = 60, 5
_TABLE8_ROWS = {FP16: "full precision", PACKED: "WindowQuant"}
_TABLE8_COLUMNS = {"paper_memory_gb": "memory", "paper_tokens_per_s": "decode throughput"}
#: Cases of the record window_search: search and plan per window, and the same per token, as far as it was measured.
WINDOW_SEARCH, TOKEN_SEARCH = "search_and_plan", "token_search_and_plan"
#: What stands in place of the device where the launches were recorded in a CUDA graph.
GRAPH = "cuda graph"
_SEARCHES = {WINDOW_SEARCH: "per window", TOKEN_SEARCH: "per token"}
#: What the same cases are called for 100 frames of 256 tokens.
_LARGE = "large_"
#: Searches per token, each with the search per window that gives as much.
_PAIRS = {
    TOKEN_SEARCH: WINDOW_SEARCH, f"{TOKEN_SEARCH}_max": WINDOW_SEARCH, "token_search_plan_and_order": "search_plan_and_order",
}  # fmt: skip


class MemoryAndThroughputParameters(Parameters):
    """Parameters of `memory_and_throughput`.

    Parameters
    ----------
    frames : int
        Whose throughput and memory are shown against the batch.
    batch : int
        Whose throughput is shown against the frames.
    gpu : str
        Whose records.
    """

    frames: int = Field(JUDGED_FRAMES, ge=1, description="frames of the panels over batches, as far as recorded")
    batch: int = Field(JUDGED_BATCH, ge=1, description="batch of the panel over frames, as far as recorded")
    gpu: str = Field("h200", description="whose records of decode steps and searches")


@register("stem", "memory_and_throughput")
class MemoryAndThroughput(Experiment[MemoryAndThroughputParameters]):
    """Recorded decode steps beside the point that the paper prints, and recorded searches."""

    stem = "memory_and_throughput"
    title = "Memory, throughput and search time"
    paper = "WindowQuant, Tables 4-6 and 8, Fig. 10-12"
    Parameters = MemoryAndThroughputParameters

    def run(self, parameters: MemoryAndThroughputParameters) -> Result:
        """Read the records; see `MemoryAndThroughputParameters`."""
        import pandas as pd

        record = decode_steps.recorded(parameters.gpu)
        data, largest = decode_steps.steps(record), decode_steps.steps(record, LARGEST)
        chosen = {
            "batch": data[data["frames"] == parameters.frames],
            "frames": data[data["batch"] == parameters.batch],
            "largest": largest,
            "table8": _with_table8(data),
        }
        tables = [table.assign(part=part) for part, table in chosen.items()]
        measured = record.evidence()
        evidence = dict.fromkeys(("tokens_per_s", "latency_ms", "peak_memory_gb", "kv_gb", "speedup", "ceiling"), measured)
        evidence |= dict.fromkeys(_TABLE8_COLUMNS, Evidence(kind="paper", source="WindowQuant, Table 8"))
        inputs, notes = [record.input(), _table8_input()], decode_steps.notes(record)
        notes.append(
            "Memory is the most that torch held: weights, cache, activations. Largest: all rows that fit into the free memory."
        )
        missing = [name for name in ("frames", "batch") if len(chosen["batch" if name == "frames" else "frames"]) == 0]
        for name in missing:
            notes.append(f"The record has no step with {name} = {getattr(parameters, name)}.")
        searches = _searches(parameters.gpu)
        if searches is None:
            notes.append(f"No search was recorded on {parameters.gpu}: wqlab bench window_search.")
        else:
            tables.append(_search_rows(searches))
            evidence["search_ms"] = searches.evidence()
            inputs.append(searches.input())
            notes.append("Searches: embeddings to widths of all layers; a CUDA graph replays them without a launch each.")
            if TOKEN_SEARCH not in set(searches.data["case"]):
                notes.append("The search per token was not recorded: wqlab bench window_search.")
        table = pd.concat(tables, ignore_index=True)
        table = table[["part", *(name for name in table.columns if name != "part")]]
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=table,
            evidence=evidence,
            values=_values(table, data) | (_search_values(searches) if searches is not None else {}),
            inputs=inputs,
            notes=notes,
        )


def _with_table8(data: pd.DataFrame) -> pd.DataFrame:
    """Return our rows at the point of Table 8 with the printed numbers beside, also where ours are missing."""
    import pandas as pd

    at = (data["batch"] == TABLE8_BATCH) & (data["frames"] == TABLE8_FRAMES)
    ours = data[at].set_index("method")
    rows = []
    for method, printed in _TABLE8_ROWS.items():
        row = {str(k): v for k, v in ours.loc[method].to_dict().items()} if method in ours.index else {}
        cells = {name: _table8()[printed, column] for name, column in _TABLE8_COLUMNS.items()}
        rows.append({"method": method, "batch": TABLE8_BATCH, "frames": TABLE8_FRAMES, **row, **cells})
    return pd.DataFrame(rows)


@lru_cache(maxsize=1)
def _table8() -> dict[tuple[str, str], float]:
    with _table8_path().open(encoding="utf-8", newline="") as file:
        return {(row["row"], row["column"]): float(row["value"]) for row in csv.DictReader(file)}


def _table8_path() -> Path:
    return paths.shipped("data") / "paper" / "windowquant_table8.csv"


def _table8_input() -> Input:
    return Input(name="data/paper/windowquant_table8.csv", sha256=records.sha256_file(_table8_path()))


def _searches(gpu: str) -> Record | None:
    """Return the record of searches, or None where it was never measured."""
    try:
        return records.read("window_search", gpu)
    except UnknownNameError:
        return None


def _search_rows(record: Record) -> pd.DataFrame:
    """Return search and plan, per window and per token, in float32, on the devices, at the sizes and in the ways measured."""
    import pandas as pd

    case = record.data["case"].str.removeprefix(_LARGE)
    data = record.data[case.isin(_SEARCHES) & (record.data["dtype"] == "float32")]
    common = {"part": "search", "method": case.map(_SEARCHES), "visual_tokens": data["num_visual"].astype(float)}
    found = [pd.DataFrame({**common, "device": data["device"], "search_ms": data["median_us"] / 1e3}, index=data.index)]
    if "graph_us" in data:
        replayed = pd.DataFrame({**common, "device": GRAPH, "search_ms": data["graph_us"] / 1e3}, index=data.index)
        found.append(replayed.dropna(subset=["search_ms"]))
    return pd.concat(found).sort_values("visual_tokens", kind="stable")


def _search_values(record: Record) -> dict[str, Value]:
    """Return how much longer searches per token take than searches per window, on the GPU; those not recorded are left out."""
    data = record.data[record.data["device"] == "cuda"]
    ways = [way for way in ("median_us", "graph_us") if way in data]
    times = {(row["dtype"], row["case"]): [float(row[way]) for way in ways] for _, row in data.iterrows()}
    found: dict[str, tuple[float, str, str]] = {}

    def state(name: str, token: str, window: str) -> None:
        """State the faster way of one over the faster way of the other."""
        ours, theirs = times.get(("float32", window)), times.get(("float32", token))
        if ours and theirs:
            found[name] = (_least(theirs) / _least(ours), "ratio", "search_ms")

    ordered = "token_search_plan_and_order"
    state("token_to_window_search_order", ordered, _PAIRS[ordered])
    state("token_to_window_search_large", _LARGE + TOKEN_SEARCH, _LARGE + WINDOW_SEARCH)
    state("token_to_window_search_order_large", _LARGE + ordered, _LARGE + _PAIRS[ordered])
    ratios = [
        theirs / ours
        for prefix in ("", _LARGE) for token, window in _PAIRS.items() for dtype in sorted(set(data["dtype"]))
        for theirs, ours in zip(times.get((dtype, prefix + token), []), times.get((dtype, prefix + window), []), strict=False)
        if math.isfinite(theirs / ours)
    ]  # fmt: skip
    if ratios:
        found["token_to_window_search_most"] = (max(ratios), "ratio", "search_ms")
    # The scores of all windows were timed one launch at a time only: what even a plan for nothing could not take away.
    scores, whole = times.get(("float32", "cosine_closed_form")), times.get(("float32", TOKEN_SEARCH))
    if scores and whole:
        found["token_search_to_window_scores"] = (whole[0] / scores[0], "ratio", "search_ms")
    return decode_steps.stated(found)


def _least(times: list[float]) -> float:
    """Return the smallest of the times that were measured; NaN where none was."""
    return min((value for value in times if math.isfinite(value)), default=math.nan)


def _values(table: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Value]:
    """Return the numbers for the ledger; those that the records lack are left out."""
    found: dict[str, tuple[float, str, str]] = {}

    def both(part: str) -> tuple[Any, Any] | None:
        rows = table[(table["part"] == part) & table["tokens_per_s"].notna()].drop_duplicates("method").set_index("method")
        return (rows.loc[FP16], rows.loc[PACKED]) if {FP16, PACKED} <= set(rows.index) else None

    at8 = both("table8")
    if at8 is not None:
        full, packed = at8
        found["table8_fp16_tokens_per_s"] = (float(full["tokens_per_s"]), "tokens/s", "tokens_per_s")
        found["table8_tokens_per_s"] = (float(packed["tokens_per_s"]), "tokens/s", "tokens_per_s")
        found["table8_throughput_ratio"] = (float(packed["tokens_per_s"] / full["tokens_per_s"]), "ratio", "tokens_per_s")
        found["table8_ceiling"] = (float(packed["ceiling"]), "ratio", "ceiling")
        found["table8_ceiling_weights"] = (float(packed["ceiling_weights"]), "ratio", "ceiling")
        for name in ("latency_ms", "attention_ms", "weight_floor_ms"):
            found[f"table8_fp16_{name}"] = (float(full[name]), "ms", "latency_ms")
        saved = float(full["peak_memory_gb"] - packed["peak_memory_gb"])
        found["table8_memory_saved_gb"] = (saved, "GB", "peak_memory_gb")
    most = both("largest")
    if most is not None:
        full, packed = most
        for name, row in (("fp16_", full), ("", packed)):
            found[f"largest_{name}batch"] = (float(row["batch"]), "requests", "tokens_per_s")
            found[f"largest_{name}tokens_per_s"] = (float(row["tokens_per_s"]), "tokens/s", "tokens_per_s")
        ratio = float(packed["tokens_per_s"] / full["tokens_per_s"])
        found["largest_throughput_ratio"] = (ratio, "ratio", "tokens_per_s")
    judged = steps[(steps["batch"] == JUDGED_BATCH) & (steps["frames"] == JUDGED_FRAMES)].set_index("method")
    if {FP16, PACKED} <= set(judged.index):
        held, most_held = judged["kv_gb"], judged["peak_memory_gb"]
        found["kv_ratio"] = (float(held[FP16] / held[PACKED]), "ratio", "kv_gb")
        found["memory_saved_gb"] = (float(most_held[FP16] - most_held[PACKED]), "GB", "peak_memory_gb")
    if "search_ms" in table:
        # The faster way of each: launched one by one, or in a CUDA graph.
        on_gpu = table[(table["part"] == "search") & table["device"].isin(("cuda", GRAPH))]
        smaller = on_gpu[on_gpu["visual_tokens"] == on_gpu["visual_tokens"].min()]
        fastest = smaller.groupby("method")["search_ms"].min()
        for case, name in _SEARCHES.items():
            if name in fastest.index:
                found[f"{case}_ms"] = (float(fastest[name]), "ms", "search_ms")
        if set(_SEARCHES.values()) <= set(fastest.index):
            found["token_to_window_search"] = (float(fastest["per token"] / fastest["per window"]), "ratio", "search_ms")
    return decode_steps.stated(found)
