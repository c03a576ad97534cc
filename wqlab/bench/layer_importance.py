"""Calibration: s_i of every layer (WindowQuant, Eq. 9), once per model, on real prose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqlab.bench import Bench
from wqlab.registry import register
from wqlab.types import Input

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LayerImportances:
    """Per layer: s_i with "after attention" read as with the residual add, and as the attention's output alone."""

    after_residual: list[float]
    attention_output: list[float]
    note: str
    inputs: tuple[Input, ...]


def measure(model: str, num_tokens: int) -> LayerImportances:
    """Run `model` once over `num_tokens` tokens of prose and return s_i per layer.

    Raises
    ------
    UnknownNameError, FetchError, DamagedFileError
        From loading the model.
    ParameterError
        When there is less prose than that.
    """
    import torch

    from wqlab.hf.capture import capture_importance
    from wqlab.models import load
    from wqlab.models.prose import prose

    loaded = load(model)
    ids, text = prose(loaded.tokenizer, num_tokens)
    with torch.inference_mode(), capture_importance(loaded.model) as meters:
        loaded.model.base_model(input_ids=ids, use_cache=False)
    return LayerImportances(
        after_residual=[m.after_residual.value() for m in meters],
        attention_output=[m.attention_output.value() for m in meters],
        note=loaded.note,
        inputs=(*loaded.inputs, text),
    )


@register("bench", "layer_importance")
class LayerImportanceBench(Bench):
    """Writes the calibration that `alpha_sweep` reads."""

    name = "layer_importance"
    description = "s_i of every layer of SmolLM2 on 4,096 tokens of prose (a calibration, not a timing)"
    uses_gpu = False
    columns = {  # noqa: RUF012
        "model": "catalogue name",
        "num_tokens": "tokens of English prose in the one prompt",
        "layer": "decoder layer, from 0",
        "s_i_residual": "mean cosine of the hidden state before attention and after the residual add (Eq. 9)",
        "s_i_attention": "mean cosine of the hidden state before attention and the attention output alone",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per layer."""
        import pandas as pd

        num_tokens = 512 if quick else 4096
        found = measure("smollm2", num_tokens)
        rows = enumerate(zip(found.after_residual, found.attention_output, strict=True))
        return pd.DataFrame([("smollm2", num_tokens, i, a, b) for i, (a, b) in rows], columns=list(self.columns))
