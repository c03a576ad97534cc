"""Bit widths of windows from similarities and thresholds (WindowQuant, Sect. 3.2.1 and 3.2.2)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.types import WindowPlan
from wqlab.windows.thresholds import check_alpha, width_limits, width_limits_on_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wqlab.windows.batch import WindowScores
    from wqlab.windows.similarity import Normalize

#: Bit widths by how many of its layer's `width_limits` a score reaches; none where it or the layer's importance is not finite.
_WIDTHS = (0, 2, 4, 16)


def assign_bit_widths(
    similarity: ArrayLike, t_low: ArrayLike, t_high: ArrayLike, first_window_full: bool = True
) -> NDArray[np.int64]:
    """Return 16, 4 or 2 bits for each layer and window; the rule itself, for one row and in numpy.

    Above `t_high`: 16 (FP16). Below `t_low`: 2. Otherwise 4. The first window stays at 16 whatever its score (Sect. 3.2.2).

    Parameters
    ----------
    similarity : array_like
        [num_windows], already on the thresholds' scale (see `wqlab.windows.similarity.normalize_scores`).
    t_low, t_high : array_like
        [num_layers], from `wqlab.windows.thresholds.thresholds`.
    first_window_full : bool
        The paper's module I; False is its ablation.

    Returns
    -------
    numpy.ndarray
        int64 [num_layers, num_windows].
    """
    score = np.asarray(similarity, dtype=np.float64)[None, :]
    low, high = np.asarray(t_low, dtype=np.float64)[:, None], np.asarray(t_high, dtype=np.float64)[:, None]
    widths = np.where(score > high, 16, np.where(score < low, 2, 4)).astype(np.int64)
    if first_window_full and widths.shape[1]:
        widths[:, 0] = 16
    return widths


def make_plan(
    similarity: WindowScores | Tensor | ArrayLike,
    importance: Tensor | ArrayLike,
    alpha: float = 2.0,
    normalize: Normalize = "none",
    *,
    first_window_full: bool = True,
    preset: Literal["paper"] | None = None,
    num_layers: int | None = None,
    check: bool = True,
) -> WindowPlan:
    """Return the bit width of every layer and window: one plan for the whole batch.

    Each row gives every window a width by the rule of `assign_bit_widths`. Over the batch the most frequent width wins, among the
    rows that have the window; of equally frequent ones the wider, because the paper does not say and precision is the safe side.

    Parameters
    ----------
    similarity : WindowScores, Tensor or array_like
        From a scorer, or plain scores [windows] or [batch, windows] of windows of 32 tokens without a tail.
    importance : Tensor or array_like
        [num_layers], s_i of Eq. 9.
    alpha : float
        Of Eq. 10 and 11; finite, > 0.
    normalize : {"none", "minmax", "rank"}
        How scores reach the thresholds' range, per row. The paper does not say; ``none`` is the literal reading, under which mean
        cosines near 0 send almost every window to INT2.
    first_window_full : bool
        Keep the first window at 16 bits (Sect. 3.2.2).
    preset : {"paper"}, optional
        The literal method: scorer ``cosine``, windows of 32 tokens, ``normalize="none"``, alpha 2, first window full. Anything else
        beside it is refused, so that the plan's label holds.
    num_layers : int, optional
        Layers of the model; `importance` must have as many.
    check : bool
        False never waits for the device: where a score or a layer's importance is not finite the width is 0, which `on_host`
        refuses.

    Returns
    -------
    WindowPlan
        With ``bit_widths`` as a Tensor on the scores' device, or a numpy array when the scores are none. Both are equal to the bit.

    Raises
    ------
    ParameterError
        For an unknown `normalize` or `preset`, an `alpha` outside its limits, scores without windows, or an `importance` that is
        not one number per layer.
    NonFiniteError
        For NaN or infinity in the scores (with `check`) or in `importance`.
    """
    import torch

    from wqlab.windows.batch import WindowScores, valid_mask
    from wqlab.windows.similarity import normalize_scores

    scores = similarity if isinstance(similarity, WindowScores) else _given(similarity)
    alpha = check_alpha(alpha)
    if preset is not None:
        _check_preset(preset, scores, alpha, normalize, first_window_full)
    as_numpy = not isinstance(scores.values, torch.Tensor)
    # float64 whatever the scores are, so that devices and numpy decide alike on a threshold.
    values = torch.as_tensor(scores.values).to(torch.float64)
    limits = _limits(importance, alpha, values.device, num_layers)
    valid = valid_mask(scores.windows_per_row, values.shape[1], values.device)

    # 0 times a score that is not finite is NaN, which reaches no limit.
    score = torch.add(normalize_scores(values, normalize, valid), values, alpha=0)
    if first_window_full:
        score[:, 0].add_(torch.inf)  # reaches every limit, and NaN stays NaN
    widths = _widths_on(values.device)[(score[:, None] >= limits).sum(0)]
    shared = _vote(widths, valid)
    if check and not bool(shared.all()):
        bad = ~values.isfinite() if valid is None else ~values.isfinite() & valid
        raise NonFiniteError(
            f"{int(bad.sum())} of {sum(scores.windows_per_row)} window scores are NaN or infinite, or the importance is; check the "
            "embeddings and calibrate the model again"
        )
    return WindowPlan(
        bit_widths=shared.numpy() if as_numpy else shared,
        window_size=scores.window_size,
        windows_per_row=scores.windows_per_row,
        tail_tokens=scores.tail_tokens,
        alpha=alpha,
        normalize=normalize,
        scorer=scores.scorer,
        first_window_full=first_window_full,
        preset=preset,
    )


def on_host(plan: WindowPlan) -> WindowPlan:
    """Return `plan` with its widths as a numpy array: the one wait for the device, and the late check of ``check=False``.

    Raises
    ------
    NonFiniteError
        When windows were scored from embeddings that are NaN or infinite.
    """
    widths = plan.bit_widths if isinstance(plan.bit_widths, np.ndarray) else plan.bit_widths.cpu().numpy()
    lost = int((widths == 0).any(0).sum())
    if lost:
        raise NonFiniteError(
            f"{lost} of {plan.num_windows} windows have a {plan.scorer} score or a layer importance that is NaN or infinite; check "
            "the model's weights and its input"
        )
    return replace(plan, bit_widths=widths)


def oracle_plan(plan: WindowPlan, relevance: ArrayLike) -> WindowPlan:
    """Return a plan of the same memory whose widest windows are those that are known to be relevant.

    What `plan` would be if its search were perfect: each layer keeps its numbers of windows per width and deals them out again, the
    widest to the most relevant. Equally relevant windows keep the order that `plan` gave them. A first window that is full stays.

    Parameters
    ----------
    plan : WindowPlan
        Of one row, or of rows with equally many windows.
    relevance : array_like
        [num_windows], larger for more relevant ones; booleans will do.

    Raises
    ------
    ParameterError
        When `relevance` is not one finite number per window.
    UnsupportedError
        For a ragged batch, in which dealing out again would change a row's memory.
    """
    given = np.asarray(relevance, dtype=np.float64)
    if given.shape != (plan.num_windows,) or not np.isfinite(given).all():
        raise ParameterError(f"relevance {given.shape} must be one finite number for each of the {plan.num_windows} windows")
    if len(set(plan.windows_per_row)) > 1:
        raise UnsupportedError(f"rows have {plan.windows_per_row} windows: make an oracle plan for one row at a time")
    widths = np.array(on_host(plan).bit_widths)
    start = int(plan.first_window_full)
    for layer in widths[:, start:]:
        # The last key of lexsort counts first.
        order = np.lexsort((-layer, -given[start:]))
        layer[order] = np.sort(layer)[::-1]
    return replace(plan, bit_widths=widths, scorer=f"oracle at the memory of {plan.scorer}", preset=None)


@functools.cache
def _widths_on(device: torch.device) -> Tensor:
    """Return `_WIDTHS` on a device, kept there: a CUDA graph cannot record a copy from the host's memory."""
    import torch

    # Not torch.tensor(..., device=device): that copy waits for the device.
    return torch.tensor(_WIDTHS).to(device, non_blocking=True)


def _given(similarity: Tensor | ArrayLike) -> WindowScores:
    """Wrap plain scores."""
    import torch

    from wqlab.windows.batch import WindowScores

    try:
        values = similarity if isinstance(similarity, torch.Tensor) else np.asarray(similarity, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"similarity is no table of numbers ({error}); for rows of different length give WindowScores"
        ) from None
    values = values[None] if values.ndim == 1 else values
    if values.ndim != 2 or 0 in values.shape:
        raise ParameterError(f"similarity {tuple(values.shape)} must be [windows] or [batch, windows] with at least one window")
    rows, count = values.shape
    return WindowScores(values, windows_per_row=(count,) * rows, tail_tokens=(0,) * rows, window_size=32, scorer="given")


def _limits(importance: Tensor | ArrayLike, alpha: float, device: torch.device, num_layers: int | None) -> Tensor:
    """Return `width_limits` as float64 [3, 1, num_layers, 1] on `device`, for scores [batch, 1, windows]."""
    import torch

    shape = tuple(importance.shape) if isinstance(importance, torch.Tensor) else np.shape(importance)
    if len(shape) != 1 or shape[0] == 0 or (num_layers is not None and shape[0] != num_layers):
        layers = "at least one layer" if num_layers is None else f"{num_layers} layers"
        raise ParameterError(f"importance {shape} must be one number per layer, for {layers}: calibrate this model (s_i of Eq. 9)")
    if isinstance(importance, torch.Tensor):
        if importance.device.type != "cpu":
            return width_limits_on_device(importance.detach().to(device), alpha)[:, None, :, None]
        importance = importance.detach().double().numpy()  # numpy knows no bfloat16
    return torch.from_numpy(width_limits(importance, alpha)).to(device, non_blocking=True)[:, None, :, None]


def _check_preset(preset: str, scores: WindowScores, alpha: float, normalize: str, first_window_full: bool) -> None:
    """Refuse what contradicts `preset`."""
    if preset != "paper":
        raise ParameterError(f"preset = {preset!r} is refused: it must be 'paper' or None")
    found = {
        "scorer": (scores.scorer, "cosine"),
        "window_size": (scores.window_size, 32),
        "alpha": (alpha, 2.0),
        "normalize": (normalize, "none"),
        "first_window_full": (first_window_full, True),
    }
    for name, (value, wanted) in found.items():
        if value != wanted:
            raise ParameterError(f"preset = 'paper' means {name} = {wanted!r}, not {value!r}: change it or leave the preset out")


def _vote(widths: Tensor, valid: Tensor | None) -> Tensor:
    """Return the most frequent width over the rows, [layers, windows], from [batch, layers, windows]; ties go to the wider.

    A window that has no width in one row, 0, has none in the plan.
    """
    import torch

    if widths.shape[0] == 1 and valid is None:
        return widths[0]

    def votes(bits: int) -> Tensor:
        cast = widths == bits
        return (cast if valid is None else cast & valid[:, None, :]).sum(0)

    votes_16, votes_4, votes_2 = votes(16), votes(4), votes(2)
    # Not argmax over the three: which of equal maxima it returns is not promised on every device.
    narrow = torch.where(votes_4 >= votes_2, 4, 2)
    shared = torch.where((votes_16 >= votes_4) & (votes_16 >= votes_2), 16, narrow)
    return shared.masked_fill(votes(0) > 0, 0)
