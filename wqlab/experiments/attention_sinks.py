"""Attention to the first tokens, per layer and head, before and after softmax (WindowQuant, Fig. 7)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from wqlab.experiments import Experiment, Parameters
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

#: The paper's window; the first group borders below make up exactly one.
_WINDOW = 32


class AttentionSinksParameters(Parameters):
    """Parameters of `attention_sinks`.

    Parameters
    ----------
    model : str
        A name from ``wqlab models list``, a folder with a transformers model, or a hub id.
    num_tokens : int
        Length of the prose prompt. Queries are its second half, keys its first.
    stage : {"before_softmax", "after_softmax"}
        Which stage the per-head panel shows; both are in the table. The paper's Fig. 7 plots Eq. 2, before softmax.
    """

    model: str = Field("smollm2", description="name, folder or hub id of a transformers model", min_length=1)
    num_tokens: int = Field(4096, ge=128, le=32768, description="tokens of prose")
    stage: Literal["before_softmax", "after_softmax"] = Field("after_softmax", description="which stage the head panel shows")


def _edges(num_keys: int) -> list[int]:
    """Return borders of key groups: single tokens first, then doubling, and 32 always among them."""
    edges = [0, 1, 2, 3, 4, 8, 16, _WINDOW]
    while edges[-1] < num_keys:
        edges.append(min(edges[-1] * 2, num_keys))
    return edges


@lru_cache(maxsize=4)
def _measure(model: str, num_tokens: int) -> tuple[Any, str, tuple[Any, ...]]:
    import pandas as pd
    import torch

    from wqlab.hf.capture import capture_attention
    from wqlab.models import load
    from wqlab.models.prose import prose

    loaded = load(model)
    ids, text = prose(loaded.tokenizer, num_tokens)
    edges = _edges(num_tokens // 2)
    with torch.inference_mode(), capture_attention(loaded.model, edges) as statistics:
        loaded.model.base_model(input_ids=ids, use_cache=False)
    rows = [
        (layer, head, edges[group], edges[group + 1], statistics.logit[layer][head, group].item(), mass[head, group].item())
        for layer, mass in sorted(statistics.mass.items())
        for head in range(mass.shape[0])
        for group in range(len(edges) - 1)
    ]
    data = pd.DataFrame(rows, columns=["layer", "head", "key_start", "key_end", "logit", "mass"])
    return data, loaded.note, (*loaded.inputs, text)


@register("stem", "attention_sinks")
class AttentionSinks(Experiment[AttentionSinksParameters]):
    """Runs the model once over real prose and reduces its attention rows block by block."""

    stem = "attention_sinks"
    title = "Attention to the first tokens"
    paper = "WindowQuant, Sect. 3.2.2 and Fig. 7"
    Parameters = AttentionSinksParameters

    def run(self, parameters: AttentionSinksParameters) -> Result:
        """Measure attention to groups of key positions.

        Returns
        -------
        Result
            Columns ``layer``, ``head``, ``key_start``, ``key_end`` (a group of positions), ``logit`` (mean scaled product, Eq. 2),
            ``mass`` (softmax weight of the whole group, mean over queries), ``mass_per_key``.
        """
        num_tokens = 512 if parameters.quick else parameters.num_tokens
        measured, note, inputs = _measure(parameters.model, num_tokens)
        data = measured.copy()
        keys = data["key_end"] - data["key_start"]
        data["mass_per_key"] = data["mass"] / keys
        heads = data.groupby(["layer", "head"]).ngroups
        first = data["key_end"] <= _WINDOW
        rest_keys = num_tokens // 2 - _WINDOW
        first_mass, rest_mass = data[first]["mass"].sum() / heads, data[~first]["mass"].sum() / heads
        first_logit = (data["logit"] * keys)[first].sum() / (heads * _WINDOW)
        rest_logit = (data["logit"] * keys)[~first].sum() / (heads * rest_keys)
        evidence = Evidence(
            kind="measured",
            source=f"{parameters.model} on {num_tokens:,} tokens of English prose (queries from {num_tokens // 2:,} on)",
            hardware=environment.hardware_line(),
        )
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(),
            data=data,
            evidence={"logit": evidence, "mass": evidence, "mass_per_key": evidence},
            values={
                "first_window_to_rest_before_softmax": Value(float(first_logit - rest_logit), "logit", "logit"),
                "first_token_mass": Value(float(data[data["key_end"] == 1]["mass"].sum() / heads), "share", "mass"),
                "first_window_mass_ratio": Value(float((first_mass / _WINDOW) / (rest_mass / rest_keys)), "ratio", "mass_per_key"),
            },
            inputs=list(inputs),
            notes=["Every counted query sees every counted key.", *([note] if note else [])],
        )
