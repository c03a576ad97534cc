"""What it costs not to reorder: decode attention over widths in the order of the video (WindowQuant, Table 8, method C)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.bench.width_order import REORDERED, RUNS, SORTED, TABLE
from wqlab.experiments import Experiment, Parameters, gpu_records
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

#: Arrangement -> its key in values, and what it is called in the figure.
_NAMES = {
    REORDERED: ("reordered", "reordered"), TABLE: ("in_place", "in place,\none launch"),
    SORTED: ("in_place_sorted", "in place, table\nsorted by width"), RUNS: ("per_run", "in place,\na launch per run"),
}  # fmt: skip
#: The point that the paper prints: batch, tokens per row (5 frames of 256).
PRINTED = (60, 1280)
_COUNTED = ("sectors_per_request", "counted_launches")
_LONG = (8, 25600)


class ReorderCostParameters(Parameters):
    """Parameters of `reorder_cost`.

    Parameters
    ----------
    plan : {"clustered", "independent"}
        How widths follow each other in the video: in runs of about eight windows, or shuffled.
    gpu : str
        Whose record.
    """

    plan: Literal["clustered", "independent"] = Field("clustered", description="widths in runs of about 8 windows, or shuffled")
    gpu: str = Field("h200", description="whose record of the bench")


@register("stem", "reorder_cost")
class ReorderCost(Experiment[ReorderCostParameters]):
    """Latency of each arrangement of the same windows, and what the hardware counted; the paper's two throughputs."""

    stem = "reorder_cost"
    title = "Decode attention over interleaved widths and over reordered ones"
    paper = "WindowQuant, Sect. 3.3.1, Table 8 (method C)"
    Parameters = ReorderCostParameters

    def run(self, parameters: ReorderCostParameters) -> Result:
        """Compute a table of two parts.

        Returns
        -------
        Result
            ``part == "bench"``: per shape, plan and arrangement the recorded ``latency_us`` of one layer, ``ratio`` to reordered,
            ``launches``, and where ncu counted (over ``counted_launches`` of them) ``sectors_per_request`` and ``dram_mb``.
            ``part == "paper"``:
            ``paper_tokens_per_s`` of whole decode steps on an A800.
        """
        import pandas as pd

        record = gpu_records.recorded("width_order", parameters.gpu, "widths in place and reordered")
        data = record.data.reset_index(drop=True)
        table = pd.DataFrame(
            {
                "part": "bench", "batch": data["batch"].astype(int), "tokens": data["seq_len"].astype(int),
                "shape": [gpu_records.shape_name(*pair) for pair in zip(data["batch"], data["seq_len"], strict=True)],
                "plan": data["plan"], "runs": data["runs"].astype(int), "arrangement": data["arrangement"],
                "key": data["arrangement"].map({name: names[0] for name, names in _NAMES.items()}),
                "name": data["arrangement"].map({name: names[1] for name, names in _NAMES.items()}),
                "way": data["way"].astype(object).fillna(""),
                **{name: data[name] for name in ("latency_us", "p10_us", "p90_us", "ratio")},
                **{name: data[name].astype("Float64").astype(float) for name in ("launches", *_COUNTED)},
                "dram_mb": data["dram_bytes"].astype("Float64").astype(float) / 1e6,
            }
        )  # fmt: skip
        cells, paper = gpu_records.printed("windowquant_table8")
        shape = {"part": "paper", "batch": PRINTED[0], "tokens": PRINTED[1], "shape": gpu_records.shape_name(*PRINTED)}
        rows = [
            {**shape, "arrangement": name, "key": _NAMES[name][0], "paper_tokens_per_s": cells[row, "decode throughput"]}
            for row, name in (("WindowQuant", REORDERED), ("without reorder", TABLE))
        ]
        counted = table["sectors_per_request"].notna()
        counters = [] if counted.any() else sorted(set(data["counters"].dropna().astype(str)))
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=pd.concat([table, pd.DataFrame(rows)], ignore_index=True),
            evidence={
                **dict.fromkeys(("latency_us", "p10_us", "p90_us", "ratio", "launches"), record.evidence()),
                **dict.fromkeys((*_COUNTED, "dram_mb"), record.evidence()),
                "paper_tokens_per_s": Evidence(kind="paper", source="WindowQuant, Table 8, whole decode steps on one A800"),
            },
            values=_values(table),
            inputs=[record.input(), paper],
            notes=[
                "One layer's attention over the same windows (10/30/60 % in 16/4/2 bits), with the same arithmetic, pipeline and "
                "split of the work by bytes. A launch per run is timed in one CUDA graph, in the fastest way found.",
                "The paper prints throughput of whole decode steps, of which attention is a part, and does not say how it computed "
                "on windows in place.",
                *([f"Counters: {'; '.join(counters)}."] if counters else []),
                *gpu_records.without_time(data, ["batch", "seq_len", "plan", "arrangement"]),
            ],
        )


def _values(table: pd.DataFrame) -> dict[str, Value]:
    """Return the numbers for the ledger, for the clustered plan and at the paper's shape unless named otherwise."""
    found: dict[str, tuple[float, str, str]] = {}
    cases = (("", PRINTED, "clustered"), ("_independent", PRINTED, "independent"))
    more = (("_long_video", _LONG, "clustered"), ("_long_video_independent", _LONG, "independent"))
    for where, shape, plan in (*cases, *more):
        chosen = (table["batch"] == shape[0]) & (table["tokens"] == shape[1]) & (table["plan"] == plan)
        rows = table[chosen].drop_duplicates("key").set_index("key")
        for key in rows.index:
            found[f"{key}_us{where}"] = (float(rows.loc[key, "latency_us"]), "us", "latency_us")
            if key != "reordered":
                found[f"{key}_to_reordered{where}"] = (float(rows.loc[key, "ratio"]), "ratio", "ratio")
            counted = float(rows.loc[key, "sectors_per_request"])
            found[f"{key}_sectors_per_request{where}"] = (counted, "sectors", "sectors_per_request")
    return gpu_records.stated(found)
