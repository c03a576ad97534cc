"""Thresholds on window similarity, per layer (WindowQuant, Eq. 10 and 11)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wqlab.errors import NonFiniteError, ParameterError

if TYPE_CHECKING:
    from torch import Tensor


def check_alpha(alpha: float) -> float:
    """Return `alpha` as a float if it is finite and above 0.

    Raises
    ------
    ParameterError
        Otherwise; the limit alpha -> 0 exists (both thresholds become s_i) but 0 itself is a division by zero.
    """
    alpha = float(alpha)
    if not math.isfinite(alpha) or alpha <= 0:
        raise ParameterError(f"alpha = {alpha} is refused: it must be finite and greater than 0 (the paper uses 2)")
    return alpha


def thresholds(importance: ArrayLike, alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``(t_low, t_high)`` for each layer.

    A window with similarity above `t_high` keeps FP16, below `t_low` gets INT2, in between INT4. With s = s_i clamped to [0, 1]::

        t_low  = (exp( alpha s) - 1) / (exp( alpha) - 1)      (Eq. 10, f1)
        t_high = (exp(-alpha s) - 1) / (exp(-alpha) - 1)      (Eq. 11, f2)

    Parameters
    ----------
    importance : array_like
        s_i of Eq. 9, any shape. Values outside [0, 1] (a cosine may be negative) are clamped.
    alpha : float
        Finite, > 0. Larger values widen the INT4 band; alpha -> 0 closes it at s_i.

    Returns
    -------
    t_low, t_high : numpy.ndarray
        float64, the shape of `importance`, 0 <= t_low <= t_high <= 1.

    Raises
    ------
    ParameterError
        For an alpha that is not finite or not above 0.
    NonFiniteError
        For NaN or infinity in `importance`.
    """
    alpha = check_alpha(alpha)
    s = np.asarray(importance, dtype=np.float64)
    if not np.isfinite(s).all():
        raise NonFiniteError(
            f"importance has {int((~np.isfinite(s)).sum())} values that are NaN or infinite; calibrate the model again"
        )
    s = np.clip(s, 0.0, 1.0)
    # expm1 keeps digits for small alpha; with exp(alpha (s - 1)) factored out, f1 does not overflow for large alpha either.
    shrink = np.expm1(-alpha * s) / math.expm1(-alpha)
    t_low = np.exp(alpha * (s - 1.0)) * shrink
    # The two meet at s = 0, s = 1 and alpha -> 0, where rounding may cross them by one ulp.
    return np.minimum(t_low, shrink), shrink


def width_limits(importance: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Return what a window's similarity must reach for INT2, for INT4 and for FP16, so that its width is a count of limits.

    All numbers reach the first limit, NaN reaches none. FP16 asks for more than `t_high`: its limit is the next float64.

    Parameters
    ----------
    importance, alpha
        As in `thresholds`, which says what is refused.

    Returns
    -------
    numpy.ndarray
        float64 [3, ...], ascending, the shape of `importance` behind the first axis.
    """
    t_low, t_high = thresholds(importance, alpha)
    return np.stack([np.full_like(t_low, -np.inf), t_low, np.nextafter(t_high, np.inf)])


def thresholds_on_device(importance: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return `thresholds` of an `importance` that lies on a device, without waiting for it.

    Parameters
    ----------
    importance : Tensor
        s_i of Eq. 9, any shape and floating dtype. NaN and infinity give NaN thresholds, for the caller to find.
    alpha : float
        As in `thresholds`.

    Returns
    -------
    t_low, t_high : Tensor
        float64, the shape and device of `importance`; equal to those of `thresholds` up to the last digit.

    Raises
    ------
    ParameterError
        For an alpha that is not finite or not above 0.
    """
    alpha = check_alpha(alpha)
    s = importance.double()
    # 0 times infinity is NaN: one operation, where isfinite alone is four kernels.
    s = s.clamp(0.0, 1.0).add_(s, alpha=0)
    t_high = (-alpha * s).expm1() / math.expm1(-alpha)
    return ((alpha * (s - 1.0)).exp() * t_high).minimum(t_high), t_high


def width_limits_on_device(importance: Tensor, alpha: float) -> Tensor:
    """Return `width_limits` of an `importance` that lies on a device, without waiting for it.

    Parameters
    ----------
    importance, alpha
        As in `thresholds_on_device`; all limits of NaN and infinity are NaN.

    Returns
    -------
    Tensor
        float64 [3, ...] on the device of `importance`.
    """
    import torch

    t_low, t_high = thresholds_on_device(importance, alpha)
    # t_high - infinity: NaN stays.
    return torch.stack([t_high - torch.inf, t_low, t_high.nextafter(torch.full_like(t_high, torch.inf))])
