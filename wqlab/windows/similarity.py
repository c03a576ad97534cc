"""Similarity of a window of tokens to the text prompt (WindowQuant, Eq. 8)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from wqlab.errors import NonFiniteError, ParameterError

Normalize = Literal["none", "minmax", "rank"]


def window_similarity(text: Tensor, tokens: Tensor, window_size: int = 32) -> Tensor:
    """Return the mean cosine between all text tokens and all tokens of each window.

    The mean over pairs of cosine(t_j, w_k) (Eq. 8) equals the dot product of two means of unit vectors, so the cost is
    O((M + N) D) and not O(M N D). The tests compare it with the pairwise definition.

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
        For an empty prompt, a window size below 1 or embeddings of different width.
    NonFiniteError
        For NaN or infinity in the embeddings.
    """
    if window_size < 1:
        raise ParameterError(f"window_size = {window_size} is refused: it must be at least 1 (the paper uses 32)")
    if text.ndim != 2 or tokens.ndim != 2 or text.shape[-1] != tokens.shape[-1] or text.shape[0] == 0:
        raise ParameterError(f"text {tuple(text.shape)} and tokens {tuple(tokens.shape)} must be [N >= 1, D] and [M, D] with one D")
    num_windows = tokens.shape[0] // window_size
    unit_text = torch.nn.functional.normalize(text.double(), dim=-1).mean(0)
    unit_tokens = torch.nn.functional.normalize(tokens[: num_windows * window_size].double(), dim=-1)
    result = unit_tokens.reshape(num_windows, window_size, tokens.shape[-1]).mean(1) @ unit_text
    if not torch.isfinite(result).all():
        raise NonFiniteError("embeddings hold NaN or infinity; check the model's weights and its input")
    return result


def normalize_scores(scores: Tensor, how: Normalize = "none") -> Tensor:
    """Map similarities to the thresholds' range.

    The thresholds of Eq. 10 and 11 live in (0, 1), mean cosines in [-1, 1] and usually near 0. The paper does not say how the
    two meet.

    Parameters
    ----------
    scores : Tensor
        [..., num_windows].
    how : {"none", "minmax", "rank"}
        ``none``: as they are (the literal reading). ``minmax``: linearly to [0, 1]; equal scores become 0.5.
        ``rank``: rank / (num_windows - 1), ties in order of position; a single window becomes 0.5.

    Raises
    ------
    ParameterError
        For another `how`.
    """
    if how == "none" or scores.shape[-1] == 0:
        return scores
    if how == "minmax":
        low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        return torch.where(high > low, (scores - low) / (high - low).clamp_min(torch.finfo(scores.dtype).tiny), 0.5)
    if how == "rank":
        count = scores.shape[-1]
        order = scores.argsort(dim=-1, stable=True).argsort(dim=-1)
        return order.to(scores.dtype) / (count - 1) if count > 1 else torch.full_like(scores, 0.5)
    raise ParameterError(f"normalize = {how!r} is refused: it must be one of {', '.join(get_args(Normalize))}")
