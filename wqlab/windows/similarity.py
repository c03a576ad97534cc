"""Similarity of windows of tokens to the text prompt (WindowQuant, Eq. 8 and Table 11)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.windows.batch import window_batch

Normalize = Literal["none", "minmax", "rank"]

#: Tokens whose distances to all text tokens are held at once.
_DISTANCE_BLOCK = 4096


def window_similarity(text: Tensor, tokens: Tensor, window_size: int = 32) -> Tensor:
    """Return the mean cosine between all text tokens and all tokens of each window, of one prompt and one video.

    For batches, other measures and other window units see `wqlab.windows.scorers`.

    Parameters
    ----------
    text : Tensor
        [N, D], embeddings of the prompt's tokens, any floating dtype.
    tokens : Tensor
        [M, D], embeddings of the windowed tokens. The last ``M mod window_size`` belong to no window.
    window_size : int
        S, tokens per window.

    Returns
    -------
    Tensor
        [M // S], float64, in [-1, 1].

    Raises
    ------
    ParameterError
        For an empty prompt, fewer tokens than one window, a window size below 1 or embeddings of different width.
    NonFiniteError
        For NaN or infinity in the embeddings.
    """
    batch = window_batch([text], [tokens], window_size=window_size, dtype=torch.float64)
    values = cosine(batch.text, batch.windows)
    batch.scores(values, "cosine")
    return values[0]


def cosine(text: Tensor, windows: Tensor, text_mask: Tensor | None = None) -> Tensor:
    """Return the mean over all pairs of cosine(t_j, w_k) for each window (Eq. 8).

    A mean of dot products is the dot product with the mean, here of the text's unit vectors: O((N + M) D) and not O(N M D). The
    tokens' norms divide their dot products, so no unit vector of a token is ever stored.

    Parameters
    ----------
    text : Tensor
        [batch, N, D], zero where padded.
    windows : Tensor
        [batch, windows, S, D], of the same dtype.
    text_mask : Tensor, optional
        bool [batch, N], True for tokens; default: all are.

    Returns
    -------
    Tensor
        [batch, windows], in [-1, 1]. A vector of zeros has cosine 0 to all; NaN or infinity makes its window NaN.
    """
    unit = _quotient(text, torch.linalg.vector_norm(text, dim=-1, keepdim=True))
    mean = unit.mean(1) if text_mask is None else unit.sum(1) / text_mask.sum(1, keepdim=True)
    # The text as a row: with a column, BLAS on a CPU takes three times as long for a batch.
    dot = torch.bmm(mean[:, None], windows.flatten(1, 2).mT).reshape(windows.shape[:-1])
    return _quotient(dot, torch.linalg.vector_norm(windows, dim=-1)).mean(-1)


def pearson(text: Tensor, windows: Tensor, text_mask: Tensor | None = None) -> Tensor:
    """Return the mean over all pairs of Pearson's correlation over the embedding's entries (Table 11).

    Correlation is the cosine of vectors from which their own mean was taken, so `cosine`'s closed form serves it.

    Parameters
    ----------
    text, windows, text_mask
        As in `cosine`.

    Returns
    -------
    Tensor
        [batch, windows], in [-1, 1]. A vector of equal entries, which has no correlation, counts as 0.
    """
    return cosine(_centred(text), _centred(windows), text_mask)


def euclidean(text: Tensor, windows: Tensor, text_mask: Tensor | None = None) -> Tensor:
    """Return 1 / (1 + d), with d the mean over all pairs of the Euclidean distance |t_j - w_k| (Table 11).

    The paper does not say how a distance becomes a similarity. This one falls with d and stays in (0, 1], where the thresholds
    live. A mean of square roots has no closed form, so the pairs are computed, a block of tokens at a time: O(N M D).

    Parameters
    ----------
    text, windows, text_mask
        As in `cosine`.

    Returns
    -------
    Tensor
        [batch, windows], in (0, 1].
    """
    blocks = []
    for tokens in torch.split(windows.flatten(1, 2), _DISTANCE_BLOCK, dim=1):
        # |a|^2 + |b|^2 - 2ab would lose the digits of small distances.
        distance = torch.cdist(tokens, text, compute_mode="donot_use_mm_for_euclid_dist")
        if text_mask is None:
            blocks.append(distance.mean(-1))
        else:
            blocks.append(distance.masked_fill(~text_mask[:, None], 0).sum(-1) / text_mask.sum(1, keepdim=True))
    mean = torch.cat(blocks, dim=1).reshape(windows.shape[:-1]).mean(-1)
    # An infinite distance would pass as similarity 0.
    return (1 / (1 + mean)).masked_fill(mean.isinf(), torch.nan)


def _quotient(values: Tensor, norm: Tensor) -> Tensor:
    """Return values / norm; 0 for a vector of zeros, NaN where the norm is not finite."""
    # Below this the squares underflow, and the norm would be noise.
    quotient = values / norm.clamp_min(torch.finfo(norm.dtype).tiny ** 0.5)
    # Finite values over a norm that overflowed would pass as 0, but 0 times infinity is NaN.
    return quotient.add_(norm, alpha=0)


def _centred(x: Tensor) -> Tensor:
    """Return `x` minus its mean over the last axis."""
    # The first entry goes before the mean, so that equal entries become exactly 0 and not rounding noise.
    x = x - x[..., :1]
    return x - x.mean(-1, keepdim=True)


def normalize_scores(scores: Tensor, how: Normalize = "none", valid: Tensor | None = None) -> Tensor:
    """Map similarities to the thresholds' range; never waits for the device.

    The thresholds of Eq. 10 and 11 live in (0, 1), mean cosines in [-1, 1] and usually near 0. The paper does not say how the
    two meet.

    Parameters
    ----------
    scores : Tensor
        [..., num_windows].
    how : {"none", "minmax", "rank"}
        ``none``: as they are (the literal reading). ``minmax``: linearly to [0, 1]; equal scores become 0.5.
        ``rank``: rank / (num_windows - 1), ties in order of position; a single window becomes 0.5.
    valid : Tensor, optional
        bool, the shape of `scores`: True in the first places of each row, for windows that the row has; the others take no part and
        their results mean nothing. Default: all are valid.

    Raises
    ------
    ParameterError
        For another `how`.
    """
    if how not in get_args(Normalize):
        raise ParameterError(f"normalize = {how!r} is refused: it must be one of {', '.join(get_args(Normalize))}")
    if how == "none" or scores.shape[-1] == 0:
        return scores
    # Behind all others, where it moves neither the minimum nor a rank.
    last = scores if valid is None else scores.masked_fill(~valid, torch.inf)
    if how == "minmax":
        above = scores - last.amin(-1, keepdim=True)
        span = (above if valid is None else above.masked_fill(~valid, 0)).amax(-1, keepdim=True)
        share = above / span
    else:
        rank = last.argsort(dim=-1, stable=True).argsort(dim=-1).to(scores.dtype)
        # Not a plain number: CUDA would multiply with its reciprocal, which may round otherwise.
        count = torch.full_like(scores[..., :1], scores.shape[-1]) if valid is None else valid.sum(-1, keepdim=True)
        share = rank / (count - 1)
    # 0 / 0: equal scores, or a single window.
    return share.nan_to_num(nan=0.5)
