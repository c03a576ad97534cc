"""Attention to the first tokens, per layer and head, before and after softmax (WindowQuant, Fig. 7)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from wqlab.experiments import Experiment, video_prompts
from wqlab.experiments.video_prompts import VideoParameters
from wqlab.models.shipped import POCKET_VLM
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

#: The paper's window; the first group borders below make up exactly one.
_WINDOW = 32
_COLUMNS = ["layer", "head", "key_start", "key_end", "logit", "mass"]


class AttentionSinksParameters(VideoParameters):
    """Parameters of `attention_sinks`; those of the videos are `VideoParameters`.

    Parameters
    ----------
    model : str
        A name from ``wqlab models list``, a folder with a transformers model, or a hub id. It reads prose.
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


def _table(statistics: Any, shift: int = 0) -> pd.DataFrame:
    """Return one row per layer, head and key group; positions count from `shift`."""
    import pandas as pd

    rows = [
        (layer, head, low - shift, high - shift, statistics.logit[layer][head, group].item(), mass[head, group].item())
        for layer, mass in sorted(statistics.mass.items())
        for head in range(mass.shape[0])
        for group, (low, high) in enumerate(pairwise(statistics.edges))
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


@lru_cache(maxsize=4)
def _read(model: str, num_tokens: int) -> tuple[Any, str, tuple[Any, ...]]:
    import torch

    from wqlab.hf.capture import capture_attention
    from wqlab.models import load
    from wqlab.models.prose import prose

    loaded = load(model)
    ids, text = prose(loaded.tokenizer, num_tokens)
    with torch.inference_mode(), capture_attention(loaded.model, _edges(num_tokens // 2)) as statistics:
        loaded.model.base_model(input_ids=ids, use_cache=False)
    return _table(statistics), loaded.note, (*loaded.inputs, text)


@lru_cache(maxsize=4)
def _watch(split: str, seed: int, num_frames: int, num_videos: int) -> tuple[Any, str, tuple[Any, ...]]:
    """Return how the questions attend to their videos: means over the videos, positions counted from the first visual token."""
    import pandas as pd
    import torch

    from wqlab.evals.threads import polite_threads
    from wqlab.hf.capture import capture_attention
    from wqlab.models import load

    loaded = load(POCKET_VLM)
    tables = []
    with polite_threads(), torch.inference_mode():
        for prompt in video_prompts.prompts(loaded, split, seed, num_frames, num_videos):
            # The last border is where the question begins, so its tokens are the queries that count.
            edges = sorted({0, 1, *(prompt.start + edge for edge in _edges(prompt.stop - prompt.start))})
            with capture_attention(loaded.model, edges) as statistics:
                loaded.model.base_model(inputs_embeds=prompt.embeddings, use_cache=False)
            tables.append(_table(statistics, prompt.start))
    mean = pd.concat(tables).groupby(_COLUMNS[:4], as_index=False)[_COLUMNS[4:]].mean()
    return mean, loaded.note, (*loaded.inputs, video_prompts.generator())


@register("stem", "attention_sinks")
class AttentionSinks(Experiment[AttentionSinksParameters]):
    """Runs a text model once over real prose, and the pocket VLM over videos; reduces attention rows block by block."""

    stem = "attention_sinks"
    title = "Attention to the first tokens"
    paper = "WindowQuant, Sect. 3.2.2 and Fig. 7"
    Parameters = AttentionSinksParameters

    def parts(self, parameters: AttentionSinksParameters) -> list[str]:
        """Return the parts of both models, and the clips that the videos' backgrounds come from."""
        return list(dict.fromkeys([*super().parts(parameters), *parameters.video_parts()]))

    def run(self, parameters: AttentionSinksParameters) -> Result:
        """Measure attention to groups of key positions.

        Returns
        -------
        Result
            Columns ``input`` (prose or video), ``model``, ``layer``, ``head``, ``key_start``, ``key_end`` (a group of positions;
            of a video counted from its first visual token), ``logit`` (mean scaled product, Eq. 2), ``mass`` (softmax weight of
            the whole group, mean over queries), ``mass_per_key``. Values without a prefix are those of `model` on prose.
        """
        import pandas as pd

        num_tokens = 512 if parameters.quick else parameters.num_tokens
        read, note, found = _read(parameters.model, num_tokens)
        tables, notes, inputs = [read.assign(input="prose", model=parameters.model)], [note], list(found)
        values = _values(read)
        source = f"{parameters.model} on {num_tokens:,} tokens of English prose (queries from {num_tokens // 2:,} on)"
        if parameters.video != "none":
            watched, video_note, found = _watch(*parameters.watched())
            tables.append(watched.assign(input="video", model=POCKET_VLM))
            notes, inputs = video_prompts.both_notes(note, video_note), list(dict.fromkeys([*inputs, *found]))
            values |= _video_values(watched)
            source += f"; {video_prompts.describe(*parameters.watched())} (queries: question and options)"
        data = pd.concat(tables, ignore_index=True)[["input", "model", *_COLUMNS]]
        data["mass_per_key"] = data["mass"] / (data["key_end"] - data["key_start"])
        evidence = Evidence(kind="measured", source=source, hardware=environment.hardware_line())
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(),
            data=data,
            evidence={"logit": evidence, "mass": evidence, "mass_per_key": evidence},
            values=values,
            inputs=inputs,
            notes=["Every counted query sees every counted key.", *(note for note in notes if note)],
        )


def _against_rest(table: pd.DataFrame) -> tuple[float, float]:
    """Return the first window against the keys behind it: logits apart, and the ratio of weights per key, over layers and heads."""
    keys, heads = table["key_end"] - table["key_start"], table.groupby(["layer", "head"]).ngroups
    first = table["key_end"] <= _WINDOW
    rest_keys = int(table["key_end"].max()) - _WINDOW
    first_mass, rest_mass = table[first]["mass"].sum() / heads, table[~first]["mass"].sum() / heads
    first_logit = (table["logit"] * keys)[first].sum() / (heads * _WINDOW)
    rest_logit = (table["logit"] * keys)[~first].sum() / (heads * rest_keys)
    return float(first_logit - rest_logit), float((first_mass / _WINDOW) / (rest_mass / rest_keys))


def _values(table: pd.DataFrame) -> dict[str, Value]:
    logits_apart, ratio = _against_rest(table)
    heads = table.groupby(["layer", "head"]).ngroups
    return {
        "first_window_to_rest_before_softmax": Value(logits_apart, "logit", "logit"),
        "first_token_mass": Value(float(table[table["key_end"] == 1]["mass"].sum() / heads), "share", "mass"),
        "first_window_mass_ratio": Value(ratio, "ratio", "mass_per_key"),
    }


def _video_values(table: pd.DataFrame) -> dict[str, Value]:
    """Return what the questions do with the first visual tokens, and with the text token before them that opens the chat."""
    visual = table[table["key_start"] >= 0]
    heads = table.groupby(["layer", "head"]).ngroups
    logits_apart, ratio = _against_rest(visual)
    above = [_against_rest(layer)[1] > 1 for _, layer in visual.groupby("layer")]
    opening = table[table["key_start"] == table["key_start"].min()]
    return {
        "first_visual_window_to_rest_before_softmax": Value(logits_apart, "logit", "logit"),
        "first_visual_window_mass_ratio": Value(ratio, "ratio", "mass_per_key"),
        "first_visual_window_mass": Value(float(visual[visual["key_end"] <= _WINDOW]["mass"].sum() / heads), "share", "mass"),
        "first_visual_window_layers_above_rest": Value(sum(above) / len(above), "share", "mass_per_key"),
        "first_visual_token_mass": Value(float(visual[visual["key_end"] == 1]["mass"].sum() / heads), "share", "mass"),
        "opening_token_mass": Value(float(opening["mass"].sum() / heads), "share", "mass"),
        "visual_mass": Value(float(visual["mass"].sum() / heads), "share", "mass"),
    }
