"""Round to nearest in real generation: perplexity, answers and bytes (WindowQuant, sect. 3.3.3; RTN rows of Table 3)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from wqlab.experiments import Experiment, Parameters, slider
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Granularity, Input, Result, Value

if TYPE_CHECKING:
    import pandas as pd

PROMPT = (
    "A river starts in the mountains as a small stream. Rain and melted snow feed it, other streams join it, and it becomes wide "
    "and slow in the plain. People build towns beside it because it gives water, food and a way to travel. At last it reaches the "
    "sea. Explain to a child, step by step, how the water comes back from the sea to the mountains."
)


class Setting(NamedTuple):
    """One row of the table; 16 bits is the cache in which nothing is encoded."""

    method: str
    num_bits: int
    granularity: Granularity | None


SETTINGS = (
    Setting("FP16", 16, None),
    Setting("INT8", 8, "window_channel"),
    Setting("INT4", 4, "window_channel"),
    Setting("INT2", 2, "window_channel"),
    Setting("INT4", 4, "window"),
    Setting("INT2", 2, "window"),
)


class RTNCacheParameters(Parameters):
    """Parameters of `rtn_cache`.

    Parameters
    ----------
    model : str
        A name from ``wqlab models list``, a folder with a transformers model, or a hub id.
    num_tokens : int
        Tokens of prose that are scored.
    window_size : int
        Tokens per window, and per forward pass while scoring.
    residual_length : int
        Newest tokens that stay in full precision.
    sink_windows : int
        First windows that stay in full precision.
    new_tokens : int
        Length of each answer.
    prompt : str
        What the model is asked.
    """

    model: str = Field("smollm2", description="name, folder or hub id of a transformers model", min_length=1)
    num_tokens: int = slider(1024, 128, 4096, 128, "tokens of prose", ge=64, le=8192)
    window_size: int = slider(32, 8, 128, 8, "tokens per window", ge=1, le=1024)
    residual_length: int = slider(0, 0, 128, 8, "newest tokens kept in FP16", ge=0, le=4096)
    sink_windows: int = slider(0, 0, 4, 1, "first windows kept in FP16", ge=0, le=64)
    new_tokens: int = Field(24, ge=1, le=256, description="tokens of each answer")
    prompt: str = Field(PROMPT, min_length=1, description="what the model is asked")


@lru_cache(maxsize=1)
def _load(model: str) -> Any:
    from wqlab.models import load

    return load(model)


def _caches(window_size: int, residual_length: int, sink_windows: int) -> Any:
    """Return one cache per setting, side by side, all holding what is not encoded in float16."""
    import torch

    from wqlab.hf import QuantizedKVCache, SideBySideCache

    caches = []
    for setting in SETTINGS:
        given: dict[str, Any] = {"window_size": window_size, "storage_dtype": torch.float16}
        if setting.granularity is None:
            given["policy"] = "full"
        else:
            given |= {"num_bits": setting.num_bits, "granularity": setting.granularity}
            given |= {"residual_length": residual_length, "sink_windows": sink_windows}
        caches.append(QuantizedKVCache(**given))
    return SideBySideCache(caches)


@lru_cache(maxsize=4)
def _scores(model: str, num_tokens: int, window_size: int, residual_length: int, sink_windows: int) -> tuple[pd.DataFrame, Input]:
    """Return perplexity, bits and bytes per setting, and the text that was scored."""
    import pandas as pd

    from wqlab.evals.memory import held_bytes
    from wqlab.evals.perplexity import perplexity
    from wqlab.evals.threads import polite_threads
    from wqlab.models.prose import prose

    language = _load(model)
    ids, text = prose(language.tokenizer, num_tokens)
    with polite_threads():
        found = perplexity(
            language.model,
            ids.expand(len(SETTINGS), -1),
            lambda: _caches(window_size, residual_length, sink_windows),
            window_size,
        )
    reports = [cache.report() for cache in found.cache.caches]
    return pd.DataFrame(
        {
            "perplexity": found.nll.double().mean(1).exp().tolist(),
            "bits_per_element": [r["bits_per_element"] for r in reports],
            "bytes_per_token_reported": [r["bytes_held"] / num_tokens for r in reports],
            "bytes_per_token_held": [held_bytes(cache) / num_tokens for cache in found.cache.caches],
        }
    ), text


@lru_cache(maxsize=4)
def _answers(
    model: str, prompt: str, new_tokens: int, window_size: int, residual_length: int, sink_windows: int
) -> tuple[pd.DataFrame, int]:
    """Return the greedy answer per setting with the first tokens it shares with FP16's, and the prompt's length in tokens."""
    import pandas as pd

    from wqlab.evals.threads import polite_threads
    from wqlab.hf import cache_argument

    language = _load(model)
    tokenizer = language.tokenizer
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    ids = ids.expand(len(SETTINGS), -1)
    cache = _caches(window_size, residual_length, sink_windows)
    with polite_threads():
        tokens = language.model.generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            do_sample=False,
            max_new_tokens=new_tokens,
            **cache_argument(language.model, cache),
        )[:, ids.shape[1] :]
    same = (tokens == tokens[:1]).long().cumprod(1).sum(1)
    answers = [" ".join(tokenizer.decode(row, skip_special_tokens=True).split()) for row in tokens]
    return pd.DataFrame({"answer": answers, "first_tokens_equal": same.tolist()}), ids.shape[1]


@register("stem", "rtn_cache")
class RTNCache(Experiment[RTNCacheParameters]):
    """Scores prose and answers a prompt behind each cache; all caches run in one batch, one row each."""

    stem = "rtn_cache"
    title = "RTN-quantized KV cache in real generation"
    paper = "WindowQuant, Sect. 3.3.3; Table 3 (RTN rows)"
    Parameters = RTNCacheParameters
    live = False

    def run(self, parameters: RTNCacheParameters) -> Result:
        """Measure every setting.

        Returns
        -------
        Result
            Coordinates ``method``, ``num_bits``, ``granularity``; ``perplexity``; ``bits_per_element`` (codes, metadata and the
            full-precision tail); ``bytes_per_token_reported`` by the cache and ``bytes_per_token_held`` by a walk over its
            tensors, all layers, K and V; ``answer`` and ``first_tokens_equal`` to FP16's.
        """
        import pandas as pd

        p = parameters
        num_tokens = min(p.num_tokens, 128) if p.quick else p.num_tokens
        new_tokens = min(p.new_tokens, 8) if p.quick else p.new_tokens
        layout = (p.window_size, p.residual_length, p.sink_windows)
        scores, text = _scores(p.model, num_tokens, *layout)
        answers, prompt_tokens = _answers(p.model, p.prompt, new_tokens, *layout)
        language = _load(p.model)
        data = pd.concat([pd.DataFrame(SETTINGS).fillna("none"), scores, answers], axis=1)
        hardware = environment.hardware_line()
        scored = Evidence(
            kind="measured",
            source=f"{p.model}, {num_tokens:,} tokens of English prose in passes of {p.window_size}",
            hardware=hardware,
        )
        answered = Evidence(
            kind="measured",
            source=f"{p.model}, greedy answers of {new_tokens} tokens to a prompt of {prompt_tokens}",
            hardware=hardware,
        )
        return Result(
            stem=self.stem,
            parameters=p.model_dump(),
            data=data,
            evidence=dict.fromkeys(scores.columns, scored) | dict.fromkeys(answers.columns, answered),
            values=_values(data),
            inputs=[*language.inputs, text],
            notes=_notes(language.note),
        )


def _values(data: pd.DataFrame) -> dict[str, Value]:
    """Return the numbers of each row, named like ``perplexity_int4`` and ``perplexity_int4_window``."""
    values = {}
    full_bytes = float(data["bytes_per_token_held"].iloc[0])
    for row in data.to_dict("records"):
        name = row["method"].lower() + ("_window" if row["granularity"] == "window" else "")
        values[f"perplexity_{name}"] = Value(row["perplexity"], "1", "perplexity")
        values[f"bits_per_element_{name}"] = Value(row["bits_per_element"], "bit", "bits_per_element")
        values[f"bytes_reduction_{name}"] = Value(full_bytes / row["bytes_per_token_held"], "ratio", "bytes_per_token_held")
        values[f"first_tokens_equal_{name}"] = Value(row["first_tokens_equal"], "token", "first_tokens_equal")
    return values


def _notes(weights: str) -> list[str]:
    return [
        f"{weights[0].upper()}{weights[1:]}.",
        "The model computes in float32; the cache holds float16 wherever it is not quantized.",
        "Each pass reads the decoded earlier windows and itself in full precision; an answer's first token comes from the prefill.",
        "The paper's Table 3 gives accuracies of video models; perplexity here can confirm the order of its RTN rows only.",
    ]
