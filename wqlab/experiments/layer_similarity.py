"""s_i per layer: how little attention turns the hidden state (WindowQuant, Eq. 9 and Fig. 8)."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from wqlab.bench.layer_importance import LayerImportances, measure
from wqlab.experiments import Experiment, Parameters
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value


class LayerSimilarityParameters(Parameters):
    """Parameters of `layer_similarity`.

    Parameters
    ----------
    model : str
        A name from ``wqlab models list``, a folder with a transformers model, or a hub id.
    num_tokens : int
        Length of the prose prompt.
    after : {"residual", "attention"}
        Which reading of "after attention" the figure puts first; both are in the table.
    """

    model: str = Field("smollm2", description="name, folder or hub id of a transformers model", min_length=1)
    num_tokens: int = Field(4096, ge=64, le=32768, description="tokens of prose")
    after: Literal["residual", "attention"] = Field("residual", description='"after attention" with or without the residual add')


@lru_cache(maxsize=4)
def _measure(model: str, num_tokens: int) -> LayerImportances:
    return measure(model, num_tokens)


@register("stem", "layer_similarity")
class LayerSimilarity(Experiment[LayerSimilarityParameters]):
    """Runs the model once over real prose and keeps one cosine per layer and reading."""

    stem = "layer_similarity"
    title = "Similarity of hidden states before and after attention"
    paper = "WindowQuant, Eq. 9 and Fig. 8"
    Parameters = LayerSimilarityParameters

    def run(self, parameters: LayerSimilarityParameters) -> Result:
        """Measure s_i for every layer.

        Returns
        -------
        Result
            Columns ``layer``, ``s_i_residual`` and ``s_i_attention`` (cosines, mean over tokens), ``s_i`` (the reading asked for).
        """
        import pandas as pd

        num_tokens = 512 if parameters.quick else parameters.num_tokens
        found = _measure(parameters.model, num_tokens)
        data = (
            pd.DataFrame({"s_i_residual": found.after_residual, "s_i_attention": found.attention_output})
            .rename_axis("layer")
            .reset_index()
        )
        data["s_i"] = data[f"s_i_{parameters.after}"]
        evidence = Evidence(
            kind="measured",
            source=f"{parameters.model} on {num_tokens:,} tokens of English prose",
            hardware=environment.hardware_line(),
        )
        s = data["s_i_residual"]
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(),
            data=data,
            evidence={"s_i_residual": evidence, "s_i_attention": evidence, "s_i": evidence},
            values={
                "num_layers": Value(len(data), "layer", "s_i_residual"),
                "share_layers_above_0_9": Value(float((s > 0.9).mean()), "share", "s_i_residual"),
                "min_s_i": Value(float(s.min()), "1", "s_i_residual"),
                "argmin_layer": Value(int(s.to_numpy().argmin()), "layer", "s_i_residual"),
                "median_s_i": Value(float(s.median()), "1", "s_i_residual"),
            },
            inputs=list(found.inputs),
            notes=[found.note] if found.note else [],
        )
