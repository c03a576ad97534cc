"""Texts as rows of a batch: each a trunk (what was said) and branches (the options) that go on from it without seeing each other.

An answer's probability needs the question before each option. Asked once, with the options as branches behind it, the question is
computed once instead of once per option. Padding may lie anywhere: positions and what may see what are always said explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Of a token in `Rows.branch`: everybody behind it sees it; nobody sees it. Branches are numbered from 1.
TRUNK, PAD = 0, -1


@dataclass(frozen=True)
class Rows:
    """Tokens of a batch of texts.

    Parameters
    ----------
    ids, positions, branch : Tensor
        int64 [batch, length], on the CPU. `positions` count what a token sees before it; `branch` is `TRUNK`, `PAD`, or the
        number of the token's branch.
    trunk : int
        Columns of the trunk. Trunks are padded on the left, so the last token of each is in column ``trunk - 1``.
    """

    ids: Tensor
    positions: Tensor
    branch: Tensor
    trunk: int


def lay_out(trunks: Sequence[Sequence[int]], branches: Sequence[Sequence[Sequence[int]]], starts: Sequence[int]) -> Rows:
    """Put texts into rows.

    Parameters
    ----------
    trunks : sequence
        Token ids of each row's trunk.
    branches : sequence
        Of each row, the token ids of its branches.
    starts : sequence of int
        How many tokens stand before each row.
    """
    width = max(map(len, trunks))
    rows: list[list[tuple[int, int, int]]] = []
    for trunk, options, start in zip(trunks, branches, starts, strict=True):
        row = [(0, 0, PAD)] * (width - len(trunk)) + [(token, start + i, TRUNK) for i, token in enumerate(trunk)]
        for number, option in enumerate(options, 1):
            row += [(token, start + len(trunk) + i, number) for i, token in enumerate(option)]
        rows.append(row)
    length = max(map(len, rows))
    table = torch.tensor([row + [(0, 0, PAD)] * (length - len(row)) for row in rows], dtype=torch.int64)
    ids, positions, branch = table.view(len(rows), length, 3).unbind(-1)
    return Rows(ids, positions, branch, trunk=width)


def visible(held: Tensor, new: Tensor) -> Tensor:
    """Return who sees whom: each new token sees the trunk before it and its own branch up to itself.

    Parameters
    ----------
    held, new : Tensor
        int64 [batch, held] and [batch, new]: `Rows.branch` of the tokens in the cache, and of those that are read now.

    Returns
    -------
    Tensor
        bool [batch, 1, new, held + new].
    """
    keys = torch.cat([held, new], dim=1)
    order = torch.arange(keys.shape[1], device=keys.device)
    before = order[None, :] <= order[held.shape[1] :, None]
    related = (keys[:, None, :] == TRUNK) | (keys[:, None, :] == new[:, :, None])
    return (related & before).unsqueeze(1)


def option_log_probs(logits: Tensor, options: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return the log-probability of each option, summed over its tokens.

    Parameters
    ----------
    logits : Tensor
        float32 [batch, 1 + columns, vocabulary]: first behind the trunk's last token, then behind each token of the branches, as
        `lay_out` puts them, where the branches are the options without their last token.
    options : sequence
        Of each row, the token ids of its options.

    Returns
    -------
    Tensor
        float64 [batch, options], on the CPU.
    """
    places: list[tuple[int, int, int, int]] = []
    for row, texts in enumerate(options):
        column = 0
        for number, text in enumerate(texts):
            # The first token is predicted by the trunk, each further one by the token before it.
            predictors = [0, *range(column + 1, column + len(text))]
            places += [(row, number, predictor, token) for predictor, token in zip(predictors, text, strict=True)]
            column += len(text) - 1
    table = torch.tensor(places, dtype=torch.int64)
    at, _, predictor, token = table.to(logits.device).unbind(-1)
    scores = logits[at, predictor, token] - logits.logsumexp(-1)[at, predictor]
    sums = torch.zeros(len(options), len(options[0]), dtype=torch.float64)
    return sums.index_put_((table[:, 0], table[:, 1]), scores.double().cpu(), accumulate=True)
