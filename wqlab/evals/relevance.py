"""Do scores of windows follow the prompt, and do they find the windows that answer it?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wqlab.errors import NonFiniteError, ParameterError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def relevant_windows(frames: Sequence[int], window_tokens: int, tokens_per_frame: int, num_windows: int) -> Bools:
    """Return which windows hold a token of one of `frames`.

    Parameters
    ----------
    frames : sequence of int
        The frames that answer, as `wqlab.evals.pocketbench.Question` names them.
    window_tokens, tokens_per_frame : int
        Visual tokens of a window and of a frame.
    num_windows : int
        Whole windows of the video.

    Returns
    -------
    ndarray
        bool [num_windows].
    """
    tokens = np.isin(np.arange(num_windows * window_tokens) // tokens_per_frame, np.asarray(frames))
    found: Bools = np.any(tokens.reshape(num_windows, window_tokens), axis=1)
    return found


def auc(scores: ArrayLike, relevant: ArrayLike) -> float:
    """Return the area under the ROC curve: how often a relevant window has a higher score than another one; ties count half.

    Parameters
    ----------
    scores : array_like
        [windows], finite.
    relevant : array_like
        bool [windows], true for at least one window and false for at least one.

    Raises
    ------
    ParameterError
        When the shapes differ, or all or none are relevant: then there is nothing to tell apart.
    NonFiniteError
        For NaN or infinity.
    """
    x, hit = np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=bool)
    if x.ndim != 1 or x.shape != hit.shape or hit.all() or not hit.any():
        raise ParameterError(
            f"{int(hit.sum())} of {hit.size} windows are relevant and there are {x.size} scores: an AUC needs a score per window, "
            "one or more that are relevant and one or more that are not"
        )
    if not np.isfinite(x).all():
        raise NonFiniteError(f"{int((~np.isfinite(x)).sum())} of {x.size} scores are NaN or infinite; check the embeddings")
    above = x[hit][:, None] - x[~hit][None, :]
    return float((above > 0).mean() + (above == 0).mean() / 2)


def precision_at_k(scores: ArrayLike, relevant: ArrayLike) -> float:
    """Return the share of relevant windows among the k with the highest scores, k being the number of relevant ones.

    Equal scores share the places that are left for them.

    Parameters and errors are those of `auc`.
    """
    auc(scores, relevant)  # refuses what has no answer
    x, hit = np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=bool)
    k = int(hit.sum())
    least = np.sort(x)[-k]
    sure, tied = x > least, x == least
    return float((hit[sure].sum() + (k - sure.sum()) * hit[tied].mean()) / k)


def interaction(scores: Floats) -> Floats:
    """Return what is left of [prompts, windows] without the mean of each prompt and of each window.

    Only this lets one prompt prefer other windows than another prompt does.
    """
    rest: Floats = scores - scores.mean(1, keepdims=True) - scores.mean(0, keepdims=True) + scores.mean()
    return rest


def variance_shares(scores: Floats) -> dict[str, float]:
    """Return how much of the variance of [prompts, windows] is the window's, the prompt's, and their interaction's.

    The three add up to 1: a two-way analysis of variance with one observation per cell. All are 0 where the scores are equal.
    """
    total = float(scores.var())
    parts = {
        "window": scores.mean(0).var(),
        "prompt": scores.mean(1).var(),
        "interaction": (interaction(scores) ** 2).mean(),
    }
    # Equal scores may differ by rounding.
    nothing = total <= (1e-12 * float(np.abs(scores).max())) ** 2
    return {name: 0.0 if nothing else float(part) / total for name, part in parts.items()}
