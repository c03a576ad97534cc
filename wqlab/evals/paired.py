"""What a method does to answers, question by question against full precision, with bootstrap intervals over the questions.

Every question is answered twice, by the full-precision model and by the method, from the same prefill. Differences are taken
question by question before they are averaged: how hard a question is then cancels, and an interval shows the method's doing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wqlab.errors import NonFiniteError, ParameterError

Floats = NDArray[np.float64]

#: Coverage of every interval.
CONFIDENCE = 0.95
#: What `per_question` returns: each aggregate is the mean of one of these.
METRICS = ("accuracy", "accuracy_fp16", "accuracy_difference", "kl", "flip_rate", "margin", "margin_fp16", "margin_difference")
#: Resampled means computed at once: bounds the memory, changes nothing.
_BLOCK = 250


def mean_interval(values: ArrayLike, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean of `values` and the limits of its 95 % percentile bootstrap interval.

    The same numbers give the same interval, in whatever order they come. Where all values are equal the interval has no width:
    the sample shows no variation, which with few questions does not prove that there is none.

    Parameters
    ----------
    values : array_like
        [n], one finite number per question, n at least 1.
    resamples : int
        Bootstrap samples.
    seed : int
        Of the resampling.

    Returns
    -------
    tuple of float
        Mean, low, high; low <= mean <= high.

    Raises
    ------
    ParameterError
        For an empty or not one-dimensional `values`.
    NonFiniteError
        For NaN or infinity.
    """
    # Sorted, so that a resample means the same whatever the order.
    x = np.sort(np.asarray(values, dtype=np.float64))
    if x.ndim != 1 or not x.size:
        raise ParameterError(f"values of shape {list(x.shape)}: a mean over questions needs one number for each of 1 or more")
    if not np.isfinite(x).all():
        raise NonFiniteError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are NaN or infinite, so they have no mean")
    means = [x[drawn].mean(1) for drawn in _resampled(x.size, resamples, seed)]
    mean = float(x.mean())
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    # Means of equal numbers can differ in their last bit.
    return mean, min(float(low), mean), max(float(high), mean)


@lru_cache(maxsize=4)
def _resampled(count: int, resamples: int, seed: int) -> list[NDArray[np.uint32]]:
    """Return which values each resample draws, in blocks: drawing takes far longer than averaging, and metrics share it."""
    rng = np.random.default_rng(seed)
    sizes = [(min(_BLOCK, resamples - i), count) for i in range(0, resamples, _BLOCK)]
    return [rng.integers(count, size=size).astype(np.uint32) for size in sizes]


def per_question(full: ArrayLike, method: ArrayLike, answer: ArrayLike) -> dict[str, Floats]:
    """Return each metric for every question, and the option that was chosen.

    Parameters
    ----------
    full, method : array_like
        [n, options]: log-probability of each option (its tokens summed), in full precision and with the method.
    answer : array_like
        int [n]: the correct option.

    Returns
    -------
    dict
        The names of `METRICS` -> float64 [n]. ``accuracy`` is 0 or 1; ``kl`` is KL(full || method) in nats between the two
        distributions over the options (softmax of their log-probabilities); ``flip_rate`` is 1 where another option is chosen
        than in full precision; ``margin`` is the log-probability of the correct option minus that of the best wrong one.

    Raises
    ------
    ParameterError
        For shapes that do not belong together, or an answer that is no option.
    NonFiniteError
        When a log-probability is NaN or infinite.
    """
    a, b = np.asarray(full, dtype=np.float64), np.asarray(method, dtype=np.float64)
    right = np.asarray(answer)
    if a.ndim != 2 or a.shape != b.shape or right.shape != a.shape[:1] or a.shape[1] < 2:
        raise ParameterError(f"shapes {a.shape}, {b.shape} and {right.shape} are not [n, options] twice and [n]")
    if right.size and not (np.issubdtype(right.dtype, np.integer) and right.min() >= 0 and right.max() < a.shape[1]):
        raise ParameterError(f"an answer is not a whole number from 0 to {a.shape[1] - 1}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise NonFiniteError("a log-probability is NaN or infinite; run the model in bfloat16 or float32")
    p, q = _log_softmax(a), _log_softmax(b)
    correct, correct_full = (x.argmax(1) == right for x in (b, a))
    margin, margin_full = _margin(b, right), _margin(a, right)
    # Rounding can leave a KL of -1e-17 between equal distributions.
    kl = np.maximum((np.exp(p) * (p - q)).sum(1), 0.0)
    return {
        "accuracy": correct.astype(np.float64),
        "accuracy_fp16": correct_full.astype(np.float64),
        "accuracy_difference": correct.astype(np.float64) - correct_full,
        "kl": kl,
        "flip_rate": (a.argmax(1) != b.argmax(1)).astype(np.float64),
        "margin": margin,
        "margin_fp16": margin_full,
        "margin_difference": margin - margin_full,
    }


def summarise(full: ArrayLike, method: ArrayLike, answer: ArrayLike, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Return ``n``, and for each of `METRICS` its mean and ``<name>_interval``, the limits of its 95 % interval.

    Parameters and errors are those of `per_question` and `mean_interval`.
    """
    summary: dict[str, Any] = {"n": len(np.asarray(answer))}
    for name, values in per_question(full, method, answer).items():
        mean, low, high = mean_interval(values, resamples, seed)
        summary |= {name: mean, f"{name}_interval": [low, high]}
    return summary


def _log_softmax(x: Floats) -> Floats:
    shifted = x - x.max(1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _margin(x: Floats, answer: NDArray[Any]) -> Floats:
    rows = np.arange(len(x))
    wrong = x.copy()
    wrong[rows, answer] = -np.inf
    result: Floats = x[rows, answer] - wrong.max(1)
    return result
