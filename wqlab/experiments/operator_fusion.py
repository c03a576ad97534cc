"""Fused against unfused decode attention over packed windows (WindowQuant, Table 9), from the record of the bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.bench.operator_fusion import ARRANGEMENTS, FUSED, IN_PLACE, MATMUL, PLAIN, SDPA
from wqlab.experiments import Experiment, Parameters, gpu_records
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

#: Arrangement -> its key in values, and what it is called in the figure.
_NAMES = {
    FUSED: ("fused", "fused"), SDPA: ("unfused", "decode,\nthen SDPA"),
    IN_PLACE: ("unfused_in_place", "decode, then SDPA\n(FP16 in place)"), MATMUL: ("matmul", "decode,\nthen matmuls"),
    PLAIN: ("operators", "torch operators,\nthen matmuls"),
}  # fmt: skip
#: The point that the paper prints: batch, tokens per row (5 frames of 256).
PRINTED = (20, 1280)
_LONG = (8, 25600)


class OperatorFusionParameters(Parameters):
    """Parameters of `operator_fusion`.

    Parameters
    ----------
    mix : {"10/30/60", "int4", "int2"}
        Widths of the windows; a mix is percent in 16, 4 and 2 bits.
    gpu : str
        Whose record.
    """

    mix: Literal["10/30/60", "int4", "int2"] = Field("10/30/60", description="percent of the windows in 16/4/2 bits, or one width")
    gpu: str = Field("h200", description="whose record of the bench")


@register("stem", "operator_fusion")
class OperatorFusion(Experiment[OperatorFusionParameters]):
    """Each arrangement's latency per layer, its parts, and how many times slower than fused it is; the paper's two numbers."""

    stem = "operator_fusion"
    title = "Fused and unfused decode attention"
    paper = "WindowQuant, Sect. 3.3.3, Table 9"
    Parameters = OperatorFusionParameters

    def run(self, parameters: OperatorFusionParameters) -> Result:
        """Compute a table of two parts.

        Returns
        -------
        Result
            ``part == "bench"``: per shape, mix and arrangement the recorded ``latency_ms`` of one layer, of which ``decode_ms`` and
            ``attention_ms`` were timed alone, and ``ratio`` to fused. ``part == "paper"``: ``paper_ms``, printed for an A800.
        """
        import pandas as pd

        record = gpu_records.recorded("operator_fusion", parameters.gpu, "fused and unfused attention")
        data = record.data.reset_index(drop=True)
        table = pd.DataFrame(
            {
                "part": "bench", "batch": data["batch"].astype(int), "tokens": data["seq_len"].astype(int), "mix": data["mix"],
                "arrangement": data["arrangement"], "attention": data["attention"].astype(object).fillna(""),
                "key": data["arrangement"].map({name: names[0] for name, names in _NAMES.items()}),
                "name": data["arrangement"].map({name: names[1] for name, names in _NAMES.items()}),
                "shape": [gpu_records.shape_name(*pair) for pair in zip(data["batch"], data["seq_len"], strict=True)],
                **{f"{name}_ms": data[f"{name}_us"] / 1e3 for name in ("latency", "p10", "p90", "decode", "attention")},
                "ratio": data["ratio"], "decode_tb_s": data["decoded_bytes"].astype(float) / data["decode_us"] / 1e6,
            }
        )  # fmt: skip
        cells, paper = gpu_records.printed("windowquant_table9")
        shape = {"part": "paper", "batch": PRINTED[0], "tokens": PRINTED[1], "shape": gpu_records.shape_name(*PRINTED)}
        rows = [
            {**shape, "arrangement": name, "key": _NAMES[name][0], "paper_ms": cells[row, "attention latency"]}
            for row, name in (("fused", FUSED), ("unfused", MATMUL))
        ]
        columns = [f"{name}_ms" for name in ("latency", "p10", "p90", "decode", "attention")]
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=pd.concat([table, pd.DataFrame(rows)], ignore_index=True),
            evidence={
                **dict.fromkeys((*columns, "ratio", "decode_tb_s"), record.evidence()),
                "paper_ms": Evidence(kind="paper", source="WindowQuant, Table 9, one A800"),
            },
            values=_values(table),
            inputs=[record.input(), paper],
            notes=[
                "One layer, 28 heads over 4 KV heads of 128 channels, one token per row; caches rotate through four times the L2 "
                "cache, and what is decoded goes through one workspace, as the layers of a model would share it.",
                "The paper does not say on which widths its numbers were taken, nor how many tokens its decode latency covers.",
                *gpu_records.without_time(data, ["batch", "seq_len", "mix", "arrangement"]),
            ],
        )


def _values(table: pd.DataFrame) -> dict[str, Value]:
    """Return the numbers for the ledger, at the paper's shape and the mix 10/30/60; those that the record lacks are left out."""
    found: dict[str, tuple[float, str, str]] = {}

    def at(shape: tuple[int, int], mix: str, arrangement: str, column: str) -> float:
        chosen = (table["batch"] == shape[0]) & (table["tokens"] == shape[1]) & (table["mix"] == mix)
        rows = table[chosen & (table["arrangement"] == arrangement)]
        return float(rows[column].iloc[0]) if len(rows) else float("nan")

    for where, shape in (("", PRINTED), ("_long_video", _LONG)):
        for arrangement in ARRANGEMENTS:
            name = _NAMES[arrangement][0]
            found[f"{name}_ms{where}"] = (at(shape, "10/30/60", arrangement, "latency_ms"), "ms", "latency_ms")
            if arrangement != FUSED:
                found[f"{name}_to_fused{where}"] = (at(shape, "10/30/60", arrangement, "ratio"), "ratio", "ratio")
    for mix in ("int4", "int2"):
        found[f"unfused_to_fused_{mix}"] = (at(PRINTED, mix, SDPA, "ratio"), "ratio", "ratio")
    found["decode_tb_s_long_video"] = (at(_LONG, "10/30/60", SDPA, "decode_tb_s"), "TB/s", "decode_tb_s")
    return gpu_records.stated(found)
