"""VQ-LLM's printed numbers against each other, and every marked contradiction of both papers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pandas as pd
import pytest

from wqlab import paths
from wqlab.claims.schema import printed
from wqlab.experiments.kv_memory import shapes

FOLDER = paths.shipped("data") / "paper"
CONTRADICTIONS = pd.read_csv(FOLDER / "contradictions.csv", keep_default_na=False)
OPERATORS = {"==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}
READ: dict[str, Callable[[float], float]] = {
    "as printed": lambda value: value,
    "as a ratio": lambda percent: 1 / (1 - percent / 100),
}
GIB = 2**30


def value(reference: str) -> float:
    """Return the number printed at `reference`."""
    return printed(reference).value


def text(row: str, column: str) -> float:
    """Return a number of VQ-LLM's text."""
    return value(f"vqllm_text | {row} | {column}")


def config(algorithm: str, column: str) -> float:
    """Return a number of VQ-LLM's table of configurations."""
    return value(f"vqllm_configs | {algorithm} | {column}")


def table5(algorithm: str, column: str) -> float:
    """Return a number of Table V."""
    return value(f"vqllm_table5 | {algorithm} | {column}")


def slack(shown: float, unit: float) -> tuple[float, float]:
    """Return the range that rounds to `shown` when the last digit is worth `unit`."""
    return shown - unit / 2, shown + unit / 2


@pytest.mark.parametrize("line", CONTRADICTIONS.to_dict("records"), ids=lambda line: line["cell"].replace(" | ", "-"))
def test_every_marked_contradiction_is_one(line: dict[str, str]) -> None:
    ours = READ[line["read"]](value(line["cell"]))
    against = value(line["against"]) / (value(line["over"]) if line["over"] else 1.0)
    assert not OPERATORS[line["should"]](ours, against)
    if line["should"] == "==":  # no rounding explains it
        assert ours != pytest.approx(against, abs=0.005)


def test_contradictions_are_listed_once_and_marked_in_their_rows() -> None:
    assert not CONTRADICTIONS.duplicated(["cell", "against"]).any()
    assert CONTRADICTIONS["note"].str.len().all()
    sides = {*CONTRADICTIONS["cell"], *CONTRADICTIONS["against"]}
    marked = set()
    for path in FOLDER.glob("*_*.csv"):
        data = pd.read_csv(path, keep_default_na=False)
        if path.stem != "vlm_configs":
            noted = data[data["note"].str.contains("contradiction")]
            marked |= {f"{path.stem} | {row} | {column}" for row, column in zip(noted["row"], noted["column"], strict=True)}
    assert marked <= sides
    assert {cell for cell in CONTRADICTIONS["cell"] if cell.startswith("vqllm_")} <= marked


@pytest.mark.parametrize("algorithm", ["QuiP#-4", "AQLM-3", "GPTVQ-2", "CQ-4", "CQ-2"])
def test_bits_per_element_follow_from_the_configuration(algorithm: str) -> None:
    index = math.log2(config(algorithm, "entries"))
    bits = index * config(algorithm, "residuals") / config(algorithm, "vector size")
    assert bits == config(algorithm, "bits per element") == int(algorithm[-1])


def test_notation_and_index_width_agree_with_the_configurations() -> None:
    assert 2 ** text("VQ<4,8,1>", "log2 of entries") == config("CQ-2", "entries") == text("bank conflicts", "entries of a codebook")
    for column in ("vector size", "residuals"):
        assert text("VQ<4,8,1>", column) == config("CQ-2", column)
    assert 2 ** config("AQLM-3", "index width") == 2 ** text("caption", "log2 of entries") == config("AQLM-3", "entries")
    assert text("caption", "residuals") == config("AQLM-3", "residuals")
    for algorithm in ("CQ-4", "CQ-2"):  # one vector of coupled channels per codebook
        assert config(algorithm, "channels of a codebook") == config(algorithm, "vector size")
    assert text("CQ example", "channels of a codebook") == config("CQ-2", "channels of a codebook")
    assert text("CQ-2 attention", "size of the KV cache") == config("CQ-2", "bits per element") / 16


def test_table_v_counts_whole_codebooks_of_two_bytes_and_quips_of_one() -> None:
    for algorithm, codebooks in (("AQLM-3", config("AQLM-3", "residuals")), ("GPTVQ-2", 16), ("CQ-2", 32)):
        one = config(algorithm, "entries") * config(algorithm, "vector size") * 2
        assert table5(algorithm, "codebook per block") * 1024 == codebooks * one
    assert 32 * config("CQ-2", "channels of a codebook") == text("microbenchmark", "head dimension")
    patterns = config("QuiP#-4", "entries looked up") * config("QuiP#-4", "vector size")
    assert table5("QuiP#-4", "codebook per block") * 1024 == patterns


def test_shuffles_of_table_v_are_one_less_than_the_quotient_of_the_layouts() -> None:
    mma = text("exchange example", "elements needed by a thread")
    for algorithm in ("QuiP#-4", "AQLM-3", "GPTVQ-2"):
        assert table5(algorithm, "shuffles in GeMM") == config(algorithm, "vector size") / mma - 1
        assert table5(algorithm, "shuffles in GeMV") == config(algorithm, "vector size") - 1
    assert table5("CQ-2", "shuffles in attention") == config("CQ-2", "vector size") - 1
    assert text("exchange example", "shuffles") == text("exchange example", "threads of a mini-warp") - 1


def test_reductions_and_speed_ups_agree_where_they_round_alike() -> None:
    for kind in ("mean", "greatest"):
        low, high = slack(text("all configurations", f"{kind} speed-up against GC"), 0.1)
        assert low <= READ["as a ratio"](text("all configurations", f"{kind} latency reduction against GC")) <= high
    low, high = (READ["as a ratio"](percent) for percent in slack(text("open-source kernels", "latency reduction to"), 0.1))
    assert low <= text("open-source kernels", "latency ratio to") <= high  # 99.1 % is 105 to 118
    low, high = (READ["as a ratio"](percent) for percent in slack(text("open-source kernels", "latency reduction from"), 0.01))
    assert not low <= text("open-source kernels", "latency ratio from") <= high  # and 64.36 % is 2.81, never 2.83
    conclusion = text("open-source kernels", "latency reduction in the conclusion, up to")
    assert conclusion == round(text("open-source kernels", "latency reduction to"))


def test_memory_of_llama_7b_fits_the_printed_bounds_in_binary_gigabytes_only() -> None:
    llama = shapes()["LLaVA-1.5-7B"]  # its language model has Llama-7B's shape
    tokens = text("end to end", "batch") * (text("end to end", "sequence") + text("end to end", "new tokens"))
    full = llama.parameters() * 2 + llama.kv_bytes(tokens)
    quarter = llama.parameters() / 2 + llama.kv_bytes(tokens, bits=4)
    above, below = (text("end to end", f"memory of {name}") for name in ("FP16, more than", "VQ-LLM-4, less than"))
    card = text("hardware", "memory of an RTX 4090")
    assert above < full / GIB < card
    assert quarter / GIB < below
    assert full / 1e9 > card
    assert quarter / 1e9 > below


def test_the_memory_reduction_of_the_attention_kernel_is_that_of_four_bits() -> None:
    assert text("CQ-4 attention", "memory reduction") == 100 * (1 - config("CQ-4", "bits per element") / 16)
    assert text("CQ-4 attention", "sequence") == text("attention", "longer sequence")
