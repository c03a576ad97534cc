"""Ranges of a model's channels over a text: what SmoothQuant, QoQ and SKVQ know before they see a request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wqlab.errors import NonFiniteError
from wqlab.hf.intercept import intercept_attention
from wqlab.quantizers.calibration import Calibration


def calibrate(model: Any, **inputs: Any) -> Calibration:
    """Run the model once over `inputs` and return the smallest and largest value of every channel, layer by layer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any model whose attention goes through transformers' attention interface.
    **inputs
        What `model` takes, ``input_ids`` for example. Several hundred tokens are enough for ranges of channels. Columns of padding
        count like tokens, so give whole rows.

    Returns
    -------
    Calibration
        On the CPU in float32.

    Raises
    ------
    UnsupportedError
        When the model does not call the attention interface.
    NonFiniteError
        When a key, value or query is not finite.
    """
    found: dict[int, tuple[Tensor, ...]] = {}

    def note(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        groups = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
        ranges = (key.amin((0, 2)), key.amax((0, 2)), value.amin((0, 2)), value.amax((0, 2)), groups.abs().amax((0, 2, 3)))
        found[layer] = tuple(r.detach().float().cpu() for r in ranges)
        return key, value, mask

    with torch.no_grad(), intercept_attention(model, note):
        model(**inputs, use_cache=False)
    calibration = Calibration(*(torch.stack(side) for side in zip(*(found[i] for i in sorted(found)), strict=True)))
    for name, ranges in vars(calibration).items():
        if not bool(torch.isfinite(ranges).all()):
            raise NonFiniteError(f"calibration: {name} is not finite; run the model in bfloat16 or float32")
    return calibration
