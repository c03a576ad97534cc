"""s_i per layer: how little attention turns the hidden state (WindowQuant, Eq. 9 and Fig. 8)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.bench.layer_importance import LayerImportances, measure
from wqlab.experiments import Experiment, video_prompts
from wqlab.experiments.video_prompts import VideoParameters
from wqlab.models.shipped import POCKET_VLM
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd


class LayerSimilarityParameters(VideoParameters):
    """Parameters of `layer_similarity`; those of the videos are `VideoParameters`.

    Parameters
    ----------
    model : str
        A name from ``wqlab models list``, a folder with a transformers model, or a hub id. It reads prose.
    num_tokens : int
        Length of the prose prompt.
    after : {"residual", "attention"}
        Which reading of "after attention" the strips show; both are in the table.
    """

    model: str = Field("smollm2", description="name, folder or hub id of a transformers model", min_length=1)
    num_tokens: int = Field(4096, ge=64, le=32768, description="tokens of prose")
    after: Literal["residual", "attention"] = Field("residual", description='"after attention" with or without the residual add')


@lru_cache(maxsize=4)
def _read(model: str, num_tokens: int) -> LayerImportances:
    return measure(model, num_tokens)


@lru_cache(maxsize=4)
def _watch(split: str, seed: int, num_frames: int, num_videos: int) -> LayerImportances:
    """Return s_i of the pocket VLM's layers, means over all tokens of all prompts."""
    import torch

    from wqlab.evals.threads import polite_threads
    from wqlab.hf.capture import capture_importance
    from wqlab.models import load

    loaded = load(POCKET_VLM)
    with polite_threads(), torch.inference_mode(), capture_importance(loaded.model) as meters:
        for prompt in video_prompts.prompts(loaded, split, seed, num_frames, num_videos):
            loaded.model.base_model(inputs_embeds=prompt.embeddings, use_cache=False)
    return LayerImportances(
        after_residual=[m.after_residual.value() for m in meters],
        attention_output=[m.attention_output.value() for m in meters],
        note=loaded.note,
        inputs=(*loaded.inputs, video_prompts.generator()),
    )


@register("stem", "layer_similarity")
class LayerSimilarity(Experiment[LayerSimilarityParameters]):
    """Runs a text model once over real prose, and the pocket VLM over videos; keeps one cosine per layer and reading."""

    stem = "layer_similarity"
    title = "Similarity of hidden states before and after attention"
    paper = "WindowQuant, Eq. 9 and Fig. 8"
    Parameters = LayerSimilarityParameters

    def parts(self, parameters: LayerSimilarityParameters) -> list[str]:
        """Return the parts of both models, and the clips that the videos' backgrounds come from."""
        return list(dict.fromkeys([*super().parts(parameters), *parameters.video_parts()]))

    def run(self, parameters: LayerSimilarityParameters) -> Result:
        """Measure s_i for every layer.

        Returns
        -------
        Result
            Columns ``input`` (prose or video), ``model``, ``layer``, ``s_i_residual`` and ``s_i_attention`` (cosines, mean over
            tokens), ``s_i`` (the reading asked for). Values without a prefix are those of `model` on prose.
        """
        import pandas as pd

        num_tokens = 512 if parameters.quick else parameters.num_tokens
        found = _read(parameters.model, num_tokens)
        tables, notes, inputs = [_table("prose", parameters.model, found)], [found.note], list(found.inputs)
        values = _values(tables[0])
        source = f"{parameters.model} on {num_tokens:,} tokens of English prose"
        if parameters.video != "none":
            watched = _watch(*parameters.watched())
            tables.append(_table("video", POCKET_VLM, watched))
            notes, inputs = video_prompts.both_notes(found.note, watched.note), list(dict.fromkeys([*inputs, *watched.inputs]))
            values |= {f"pocket_vlm_{name}": value for name, value in _values(tables[1]).items()}
            source += f"; {video_prompts.describe(*parameters.watched())}"
        data = pd.concat(tables, ignore_index=True)
        data["s_i"] = data[f"s_i_{parameters.after}"]
        evidence = Evidence(kind="measured", source=source, hardware=environment.hardware_line())
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(),
            data=data,
            evidence={"s_i_residual": evidence, "s_i_attention": evidence, "s_i": evidence},
            values=values,
            inputs=inputs,
            notes=[note for note in notes if note],
        )


def _table(read: str, model: str, found: LayerImportances) -> pd.DataFrame:
    import pandas as pd

    columns = {"s_i_residual": found.after_residual, "s_i_attention": found.attention_output}
    return pd.DataFrame({"input": read, "model": model, "layer": range(len(found.after_residual)), **columns})


def _values(table: pd.DataFrame) -> dict[str, Value]:
    s = table["s_i_residual"]
    return {
        "num_layers": Value(len(s), "layer", "s_i_residual"),
        "share_layers_above_0_9": Value(float((s > 0.9).mean()), "share", "s_i_residual"),
        "min_s_i": Value(float(s.min()), "1", "s_i_residual"),
        "argmin_layer": Value(int(s.to_numpy().argmin()), "layer", "s_i_residual"),
        "median_s_i": Value(float(s.median()), "1", "s_i_residual"),
    }
