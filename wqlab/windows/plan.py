"""Bit widths of windows from similarities and thresholds (WindowQuant, Sect. 3.2.1 and 3.2.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def assign_bit_widths(
    similarity: ArrayLike, t_low: ArrayLike, t_high: ArrayLike, first_window_full: bool = True
) -> NDArray[np.int64]:
    """Return 16, 4 or 2 bits for each layer and window.

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
