"""Accuracy against bits, weights and cache, vectors and elements; and what both kinds of points look like on real keys (Fig. 2)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from wqlab.errors import ParameterError
from wqlab.experiments import Experiment, Parameters, gpu_records, slider
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd
    from numpy.typing import NDArray

    from wqlab.records import Record

_ACCURACY = ("vq_caches", "vq_weights")
KEYS_RECORD = "vq_keys"
#: Tokens of prose whose keys teach the codebook, and tokens whose keys are drawn and judged.
_LEARN, _SHOWN = 1024, 256
_QUICK_LEARN, _QUICK_SHOWN = 160, 64
#: What an exam is drawn by: its metric, lower or higher is better.
METRICS = {"prose": "nll_difference", "pocketbench hard": "accuracy_difference", "pocketbench easy": "accuracy_difference"}
_WINDOW = 32


class VQQualityParameters(Parameters):
    """Parameters of `vq_quality`.

    Parameters
    ----------
    exam : {"prose", "pocketbench hard", "pocketbench easy"}
        Perplexity of SmolLM2 on prose, or answers of the pocket VLM.
    layer, head, pair : int
        Whose keys are drawn: channels ``2 pair`` and ``2 pair + 1`` of a KV head.
    keys : {"before", "after"}
        Before their rotary positions or behind them.
    num_bits : {2, 4}
        Bits per element of both grids.
    model : str
        A causal language model for the keys.
    gpu : str
        Whose record of accuracy.
    """

    exam: Literal["prose", "pocketbench hard", "pocketbench easy"] = Field("prose", description="what is judged")
    layer: int = slider(14, 0, 29, 1, "layer whose keys are drawn", ge=0)
    head: int = slider(0, 0, 2, 1, "KV head", ge=0)
    pair: int = slider(5, 0, 31, 1, "pair of neighbouring channels", ge=0)
    keys: Literal["before", "after"] = Field("before", description="before the rotary positions, or behind them")
    num_bits: Literal[2, 4] = Field(2, description="bits per element of the two grids")
    model: str = Field("smollm2", description="language model whose keys are drawn")
    gpu: str = Field("h200", description="whose record of accuracy")


@register("stem", "vq_quality")
class VQQuality(Experiment[VQQualityParameters]):
    """Accuracy from the record, keys measured here."""

    stem = "vq_quality"
    title = "Vectors against elements: accuracy and bits"
    paper = "VQ-LLM, Sect. 2.2, Fig. 2"
    Parameters = VQQualityParameters
    live = False

    def run(self, parameters: VQQualityParameters) -> Result:
        """Compute the parts of one table.

        Returns
        -------
        Result
            ``part`` is ``weights``, ``cache`` or ``both``: per ``setting`` and ``metric`` of the exam the recorded ``value`` with
            ``low`` and ``high``, ``code_bits``, ``codebook_bits`` and ``total_bits``. ``keys``: held-out keys of the channel pair,
            ``x`` and ``y``. ``rtn points``, ``cq points``: where each method puts them. ``error``: per method the ``mse`` on these
            keys. ``rotary``, where it was recorded: ``key_error`` per tensor, kind of ``keys``, method and width, a mean over
            layers.

        Raises
        ------
        ParameterError
            For a layer, head or pair that the model lacks.
        MissingPartError
            When accuracy was not recorded on this GPU.
        """
        import pandas as pd

        p = parameters
        records = [record for name in _ACCURACY if (record := gpu_records.find(name, p.gpu)) is not None]
        if not records:
            gpu_records.needed(_ACCURACY[0], p.gpu, "accuracy with quantized weights and caches")
        data = pd.concat([record.data for record in records], ignore_index=True)
        chosen = data[(data["exam"] == p.exam) | (data["exam"] == "layers")].drop(columns="learn_s")
        drawn, inputs, note = _points(p.model, p.layer, p.head, p.pair, p.keys, p.num_bits, p.quick)
        tables = [chosen, drawn]
        here = Evidence(kind="measured", source=f"keys of {p.model}, {note}", hardware=environment.hardware_line())
        evidence = dict.fromkeys(("value", "low", "high", "code_bits", "codebook_bits", "total_bits"), _all(records))
        evidence |= dict.fromkeys(("x", "y", "mse"), here)
        values = _values(data) | _point_values(drawn)
        notes = [_describe(data, p.exam), *_lacking(records, p.gpu, p.exam)]
        rotary = gpu_records.find(KEYS_RECORD, p.gpu)
        if rotary is None:
            notes.append(f"Errors before and behind rotary positions are missing: {gpu_records.how_to_get(KEYS_RECORD, p.gpu)}.")
        else:
            by = ["tensor", "keys", "method", "num_bits"]
            mean = rotary.data.fillna({"keys": ""}).groupby(by)["error"].mean().reset_index()
            tables.append(mean.rename(columns={"error": "key_error", "keys": "rotary"}).assign(part="rotary"))
            evidence["key_error"] = rotary.evidence()
            values |= _rotary_values(mean)
            inputs.append(rotary.input())
            notes.append(
                "M-RoPE: the pocket VLM's keys turned by positions in time, height and width, as Qwen2-VL divides a head; the "
                "model itself was trained with one axis."
            )
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=pd.concat(tables, ignore_index=True),
            evidence=evidence,
            values=values,
            inputs=[*inputs, *(record.input() for record in records)],
            notes=[
                *notes,
                "Bits of weights count scales and codebooks: left end of a line, codes alone; right end, everything. A cache's "
                "codebooks belong to the model and are not in its bits.",
                f"Points: {note}. RTN has one range per channel over all tokens shown, CQ learnt its points on other tokens.",
            ],
        )


def _all(records: list[Record]) -> Evidence:
    """Return the evidence of several records; its words name each."""
    found = [record.evidence() for record in records]

    def joined(words: Iterable[str | None]) -> str:
        return ", ".join(dict.fromkeys(str(word) for word in words))

    return replace(
        found[0],
        source=joined(e.source for e in found),
        hardware=joined(e.hardware for e in found),
        file=joined(e.file for e in found),
        commit=joined(e.commit for e in found),
        date=joined(e.date for e in found),
    )


def _lacking(records: list[Record], gpu: str, exam: str) -> list[str]:
    """Say which record is missing, and which has nothing for this exam."""
    found = {record.name: record for record in records}
    notes = [f"{name} was not recorded on {gpu}: {gpu_records.how_to_get(name, gpu)}." for name in _ACCURACY if name not in found]
    return notes + [f"{name} has nothing on {exam}." for name, record in found.items() if exam not in set(record.data["exam"])]


def _describe(data: pd.DataFrame, exam: str) -> str:
    rows = data[(data["exam"] == exam) & (data["metric"] == METRICS[exam])]
    n = int(rows["n"].max())
    if exam == "prose":
        return f"SmolLM2-135M on {n} texts of English prose, intervals over texts; its FP16 weights are dequantized from Q4_1."
    return f"Pocket VLM, {exam}, {n} questions nobody tuned on, paired with full precision."


@lru_cache(maxsize=2)
def _keys(model: str, keys: Literal["before", "after"], quick: bool) -> tuple[list[NDArray[Any]], list[NDArray[Any]], list[Input]]:
    """Return per layer the keys [heads, tokens, head_dim] of the learning and of the shown text."""
    from wqlab.hf.kv_codebooks import sample_kv
    from wqlab.models import load
    from wqlab.models.prose import prose

    loaded = load(model)
    learn, shown = (_QUICK_LEARN, _QUICK_SHOWN) if quick else (_LEARN, _SHOWN)
    # The text whose keys are shown lies far behind the one that taught.
    texts = [prose(loaded.tokenizer, learn), prose(loaded.tokenizer, shown, skip=8 * learn)]
    found = [[layer.key[0].float().numpy() for layer in sample_kv(loaded.model, keys, input_ids=ids)] for ids, _ in texts]
    return found[0], found[1], [*loaded.inputs, *(source for _, source in texts)]


def _points(
    model: str, layer: int, head: int, pair: int, keys: Literal["before", "after"], num_bits: int, quick: bool
) -> tuple[pd.DataFrame, list[Input], str]:
    import pandas as pd
    import torch

    from wqlab.quantizers import create, kmeans

    learn, shown, inputs = _keys(model, keys, quick)
    for name, value, limit in (
        ("layer", layer, len(learn)),
        ("head", head, learn[0].shape[0]),
        ("pair", pair, learn[0].shape[2] // 2),
    ):
        if value >= limit:
            raise ParameterError(f"{name} = {value} is too large: {model} has {limit}, numbered from 0")
    channels = slice(2 * pair, 2 * pair + 2)
    taught, x = learn[layer][head, :, channels], shown[layer][head, :, channels]
    levels = 2**num_bits
    # A pair at b bits per element: one index of 2 b bits.
    entries = kmeans.learn(torch.from_numpy(taught.copy())[None], min(levels**2, 256), seed=0).entries[0].numpy()
    axes = [np.linspace(low, high, levels) for low, high in zip(x.min(0), x.max(0), strict=True)]
    grid = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    windows = torch.from_numpy(x[: len(x) // _WINDOW * _WINDOW].copy())[None, None]
    rtn = create("rtn", num_bits)
    errors = {
        "rtn": _mse(x, grid),
        "cq": _mse(x, entries),
        "rtn windows": float((rtn.dequantize(rtn.quantize(windows)) - windows).square().mean()),
    }
    parts = [
        pd.DataFrame({"part": "keys", "x": x[:, 0], "y": x[:, 1]}),
        pd.DataFrame({"part": "rtn points", "x": grid[:, 0], "y": grid[:, 1]}),
        pd.DataFrame({"part": "cq points", "x": entries[:, 0], "y": entries[:, 1]}),
        pd.DataFrame({"part": "error", "method": list(errors), "mse": list(errors.values())}),
    ]
    where = "before" if keys == "before" else "behind"
    place = f"layer {layer}, KV head {head}, channels {2 * pair} and {2 * pair + 1}"
    note = f"{place}, {where} the rotary positions, {len(x)} tokens of prose"
    return pd.concat(parts, ignore_index=True), list(inputs), note


def _mse(x: NDArray[Any], points: NDArray[Any]) -> float:
    """Return the mean squared error per element of the nearest points."""
    return float(np.square(x[:, None] - points[None]).sum(-1).min(1).mean() / 2)


def _slug(setting: str) -> str:
    """``"cq 2 bits, keys before RoPE, plain"`` -> ``"cq_2_before"``; Fisher weighting and own policies keep their word."""
    drop = {"bits", "bits,", "keys", "rope", "plain"}
    words = [w.strip(",") for w in setting.lower().replace("+", "and").split() if w.strip(",") not in drop]
    return "_".join(words)


def _values(data: pd.DataFrame) -> dict[str, Value]:
    """Return, for the ledger, every recorded mean, and the bits of each setting, on all exams."""
    found: dict[str, tuple[float, str, str]] = {}
    for row in data.to_dict("records"):
        name = f"cache_{_slug(row['setting'])}" if row["part"] == "cache" and row["setting"] != "fp16" else _slug(row["setting"])
        exam = row["exam"].removeprefix("pocketbench ")
        if row["metric"] == "nll":
            found[f"perplexity_{name}"] = (float(np.exp(row["value"])), "1", "value")
        elif exam in ("prose", "layers"):
            found[f"{row['metric']}_{name}"] = (row["value"], "nat" if exam == "prose" else "1", "value")
        else:
            unit = "nat" if row["metric"] == "kl" else "share"
            found[f"{row['metric']}_{name}_{exam}"] = (row["value"], unit, "value")
        if exam in ("prose", "layers"):
            found[f"total_bits_{name}"] = (row["total_bits"], "bit", "total_bits")
            found[f"codebook_bits_{name}"] = (row["codebook_bits"], "bit", "codebook_bits")
    return gpu_records.stated(found)


def _point_values(drawn: pd.DataFrame) -> dict[str, Value]:
    rows = drawn[drawn["part"] == "error"].set_index("method")["mse"]
    found = {f"mse_{str(method).replace(' ', '_')}": (float(value), "1", "mse") for method, value in rows.items()}
    found["mse_rtn_to_cq"] = (float(rows["rtn"] / rows["cq"]), "ratio", "mse")
    return gpu_records.stated(found)


def _rotary_values(mean: pd.DataFrame) -> dict[str, Value]:
    rows = mean.to_dict("records")
    found = {}
    for row in rows:
        tensor = "_".join(word for word in (row["tensor"], row["keys"]) if word)
        found[f"error_{tensor}_{row['method']}_{row['num_bits']}"] = (row["error"], "1", "key_error")
    return gpu_records.stated(found)
