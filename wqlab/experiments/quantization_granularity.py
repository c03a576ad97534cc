"""What shares a scale: bytes of metadata from the formula, and what each choice costs in answers (WindowQuant, Table 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field

from wqlab import quantizers
from wqlab.experiments import Experiment, Parameters, answers, gpu_records, slider
from wqlab.experiments.kv_memory import Shape, shape_of
from wqlab.registry import register
from wqlab.types import Evidence, Granularity, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

GRANULARITIES = get_args(Granularity)
#: The setting that Table 10 states, and the tokens per frame of the two models that it may mean.
PRINTED_FRAMES, PRINTED_TOKENS = 100, (196, 256)
_MODEL, _WINDOW = "LLaVA-OneVision-7B", 32
_COUNTED = ("metadata_mb", "codes_mb", "bits_per_element")


class QuantizationGranularityParameters(Parameters):
    """Parameters of `quantization_granularity`; the table's own setting is always in the result.

    Parameters
    ----------
    model : str
        A name of ``data/paper/vlm_configs.csv``, or a folder with a ``config.json``.
    frames, tokens_per_frame : int
        The video.
    window_size : int
        Tokens per window.
    num_bits : {2, 4, 8}
        Bits per code, of all windows; the answers shown are of this width too, where it was recorded.
    split : {"hard", "easy"}
        Of PocketBench.
    gpu : str
        Whose record of answers.
    """

    model: str = Field(_MODEL, description="a name of data/paper/vlm_configs.csv, or a folder with a config.json")
    frames: int = slider(PRINTED_FRAMES, 1, 1000, 1, "frames of the video", ge=1, le=1_000_000)
    tokens_per_frame: int = slider(PRINTED_TOKENS[0], 1, 1024, 1, "visual tokens per frame", ge=1, le=100_000)
    window_size: int = slider(_WINDOW, 8, 256, 8, "tokens per window", ge=1, le=100_000)
    num_bits: Literal[2, 4, 8] = Field(2, description="bits per code")
    split: Literal["hard", "easy"] = Field("hard", description="split of PocketBench")
    gpu: str = Field("h200", description="whose record of answers")


@register("stem", "quantization_granularity")
class QuantizationGranularity(Experiment[QuantizationGranularityParameters]):
    """Metadata counted from the quantizer's own formula; answers from the record."""

    stem = "quantization_granularity"
    title = "What shares a scale: metadata and answers"
    paper = "WindowQuant, Sect. 4.4, Table 10"
    Parameters = QuantizationGranularityParameters

    def run(self, parameters: QuantizationGranularityParameters) -> Result:
        """Compute up to four parts in one table.

        Returns
        -------
        Result
            ``part == "metadata"``: per ``granularity`` the ``metadata_mb`` (scale and minimum of two bytes each), ``codes_mb``
            and ``bits_per_element`` of a whole video at the chosen setting. ``part == "table"``: the same at the paper's setting,
            for both ``tokens_per_frame`` that it may mean. ``part == "paper"``: ``paper_metadata_mb`` and ``paper_accuracy``
            under the printed labels. ``part == "answers"``, where they were recorded: per ``granularity`` and ``num_bits`` the
            metrics of `wqlab.experiments.answers`, against full precision, with the ``recorded_bits_per_element``.
        """
        import pandas as pd

        p = parameters
        shape = shape_of(p.model)
        chosen = counted(shape, p.frames * p.tokens_per_frame, p.window_size, p.num_bits)
        tables = [chosen.assign(part="metadata", tokens_per_frame=p.tokens_per_frame)]
        for tokens in PRINTED_TOKENS:
            found = counted(shape_of(_MODEL), PRINTED_FRAMES * tokens, _WINDOW, 2)
            tables.append(found.assign(part="table", tokens_per_frame=tokens))
        cells, paper = gpu_records.printed("windowquant_table10")
        printed = [(row, cells[row, "metadata"], cells[row, "accuracy"]) for row in ("per-tensor", "group")]
        tables.append(pd.DataFrame(printed, columns=["label", "paper_metadata_mb", "paper_accuracy"]).assign(part="paper"))
        formula = Evidence(kind="simulated", source=f"bytes of the codes, scales and minima of {p.model}, counted from its shape")
        evidence = dict.fromkeys(_COUNTED, formula)
        evidence |= dict.fromkeys(
            ("paper_metadata_mb", "paper_accuracy"), Evidence(kind="paper", source="WindowQuant, Table 10, labels as printed")
        )
        values, inputs, notes = _formula_values(pd.concat(tables, ignore_index=True)), [paper], []
        record = answers.find(p.gpu)
        if record is None:
            notes.append(f"Answers on {p.gpu} are missing: {gpu_records.how_to_get(answers.RECORD, p.gpu)}.")
        else:
            rows = _answers(record, p.split)
            tables.append(rows.assign(part="answers"))
            evidence |= dict.fromkeys((*answers.COLUMNS, "recorded_bits_per_element"), record.evidence())
            values |= _answer_values(record)
            inputs.append(record.input())
            notes.append(answers.describe(record, "cache_then_ask", p.split))
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=pd.concat(tables, ignore_index=True),
            evidence=evidence,
            values=values,
            inputs=inputs,
            notes=[
                f"Metadata: a scale and a minimum of two bytes each for every group of K and of V; {p.model}, "
                f"{p.frames:,} frames x {p.tokens_per_frame} tokens, windows of {p.window_size}.",
                "Table 10 gives per-tensor quantization the larger metadata and the higher accuracy; Sect. 4.4 says the opposite.",
                *notes,
            ],
        )


def counted(shape: Shape, tokens: int, window_size: int, num_bits: int) -> pd.DataFrame:
    """Return ``granularity``, ``metadata_mb``, ``codes_mb`` and ``bits_per_element`` of the whole windows of `tokens` tokens."""
    import pandas as pd

    windows = tokens // window_size
    elements = windows * window_size * shape.kv_values()
    rows = []
    for granularity in GRANULARITIES:
        quantizer = quantizers.create("rtn", num_bits, window_size, granularity, "key")
        cost = quantizer.bits_per_element((1, shape.num_kv_heads, window_size, shape.head_dim))
        rows.append((granularity, (cost - num_bits) * elements / 8e6, num_bits * elements / 8e6, cost))
    return pd.DataFrame(rows, columns=["granularity", "metadata_mb", "codes_mb", "bits_per_element"])


def _answers(record: Record, split: str) -> pd.DataFrame:
    found = answers.summarised(record, group="granularity", protocol="cache_then_ask", split=split)
    return found.rename(columns={"bits_per_element": "recorded_bits_per_element"})


def _formula_values(table: pd.DataFrame) -> dict[str, Value]:
    rows = table[table["part"] == "table"]
    found: dict[str, Value] = {}
    for tokens in PRINTED_TOKENS:
        by = rows[rows["tokens_per_frame"] == tokens].set_index("granularity")["metadata_mb"]
        for granularity in GRANULARITIES:
            found[f"{granularity}_mb_{tokens}"] = Value(float(by[granularity]), "MB", "metadata_mb")
        found[f"channel_to_window_{tokens}"] = Value(float(by["window_channel"] / by["window"]), "ratio", "metadata_mb")
        found[f"channel_to_head_{tokens}"] = Value(float(by["window_channel"] / by["window_head"]), "ratio", "metadata_mb")
    return found


def _answer_values(record: Record) -> dict[str, Value]:
    """Return, for the ledger, accuracy and KL per granularity and width on the hard split."""
    found: dict[str, tuple[float, str, str]] = {}
    for row in _answers(record, "hard").to_dict("records"):
        if row["method"] == "fp16":
            continue
        width = f"int{row['num_bits']}" if row["method"] == "rtn" else row["method"]
        name = f"{row['granularity']}_{width}"
        found[f"accuracy_{name}"] = (row["accuracy"], "share", "accuracy")
        found[f"accuracy_loss_{name}"] = (-row["accuracy_difference"], "share", "accuracy_difference")
        found[f"kl_{name}"] = (row["kl"], "nat", "kl")
    return gpu_records.stated(found)
