"""A batch of conversations in one cache: the video first, then text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wqlab.errors import NonFiniteError
from wqlab.evals.scoring import rows
from wqlab.hf import QuantizedKVCache, cache_argument


class Stream:
    """What a model has read so far, and in which cache.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model, or a VLM, that takes ``inputs_embeds``, four-dimensional attention masks, position ids and
        ``logits_to_keep``.
    cache : Cache
        Holds what was read.
    branch : Tensor
        int64 [batch, held], `Rows.branch` of the tokens in the cache.
    positions : Tensor
        int64 [batch, held], the rotary positions of these tokens.
    lengths : list of int
        Of each row's trunk.
    last : Tensor
        float32 [batch, vocabulary]: logits behind each row's trunk.
    """

    def __init__(self, model: Any, cache: Any, branch: Tensor, positions: Tensor, lengths: list[int], last: Tensor) -> None:
        self.model, self.cache, self.branch, self.positions = model, cache, branch, positions
        self.lengths, self.last = lengths, last

    @classmethod
    def prefill(cls, model: Any, embeddings: Tensor) -> Stream:
        """Read embeddings [batch, seq, hidden], all rows of one length, in full precision."""
        cache = QuantizedKVCache(policy="full")
        with float32_head(model):
            logits = model(
                inputs_embeds=embeddings, use_cache=True, logits_to_keep=1, **cache_argument(model, cache)
            ).logits  # without a mask, which lets torch take its fastest attention
        batch, seq = embeddings.shape[:2]
        branch = torch.full((batch, seq), rows.TRUNK, dtype=torch.int64, device=embeddings.device)
        positions = torch.arange(seq, device=embeddings.device).expand(batch, seq)
        return cls(model, cache, branch, positions, [seq] * batch, logits[:, -1])

    def moved_to(self, cache: Any) -> Stream:
        """Return a stream that has read the same and goes on in `cache`, an empty one that is filled from this stream's.

        The K and V of the prefill are handed over as they are: quantizing them costs no second pass through the model.
        """
        if hasattr(cache, "assume_positions"):
            cache.assume_positions(self.positions)
        for index, layer in enumerate(self.cache.layers):
            (key,), (value,) = layer.segments.key.parts(), layer.segments.value.parts()
            cache.update(key, value, index)
        return Stream(self.model, cache, self.branch, self.positions, self.lengths, self.last)

    def read(self, trunks: Sequence[Sequence[int]], branches: Sequence[Sequence[Sequence[int]]] | None = None) -> Tensor:
        """Read one text per row, and branches behind it; the trunk grows by the text, branches are no part of it.

        Parameters
        ----------
        trunks : sequence
            Token ids per row; of all rows or of none they may be empty.
        branches : sequence, optional
            Token ids of each row's branches.

        Returns
        -------
        Tensor
            float32 [batch, 1 + columns, vocabulary]: logits behind the trunk, and behind each token of the branches, which
            `rows.lay_out` puts into columns.
        """
        new = rows.lay_out(trunks, branches or [[]] * len(trunks), self.lengths)
        length = new.ids.shape[1]
        if not length:
            return self.last.unsqueeze(1)
        device = self.branch.device
        branch, positions = new.branch.to(device), new.positions.to(device)
        embeddings = self.model.get_input_embeddings()(new.ids.to(device))
        # Added to the scores, because eager attention knows no boolean mask.
        hidden = ~rows.visible(self.branch, branch)
        mask = torch.zeros(hidden.shape, dtype=embeddings.dtype, device=device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        keep = length - max(new.trunk - 1, 0)
        with float32_head(self.model):
            logits: Tensor = self.model(
                inputs_embeds=embeddings,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=keep,
                **cache_argument(self.model, self.cache),
            ).logits[:, -keep:]
        self.branch = torch.cat([self.branch, branch], dim=1)
        self.positions = torch.cat([self.positions, positions], dim=1)
        self.lengths = [before + len(trunk) for before, trunk in zip(self.lengths, trunks, strict=True)]
        if not new.trunk:  # what stands behind the trunk was said by the pass that read it
            logits = torch.cat([self.last.unsqueeze(1), logits], dim=1)
        self.last = logits[:, 0]
        return logits

    def score(self, asked: Sequence[Sequence[int]], options: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Read `asked` and return the log-probability of each option behind it, its tokens summed: float64 [batch, options].

        An option's last token (the end token) is scored, and never read.

        Raises
        ------
        NonFiniteError
            When one is NaN or infinite.
        """
        scores = rows.option_log_probs(self.read(asked, [[text[:-1] for text in row] for row in options]), options)
        if not bool(torch.isfinite(scores).all()):
            raise NonFiniteError(
                "the model gives an option a log-probability that is NaN or infinite; run it in bfloat16 or float32"
            )
        return scores


@contextmanager
def float32_head(model: Any) -> Iterator[None]:
    """Let `model` compute its logits in float32 inside the block.

    The spacing of bfloat16 near a logit of 20 is 0.125: differences between methods are smaller.
    """
    head = model.get_output_embeddings()
    if head.weight.dtype == torch.float32:
        yield
        return

    def in_float32(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.float()
        return F.linear(args[0].float(), module.weight.float(), bias)

    handle = head.register_forward_hook(in_float32)
    try:
        yield
    finally:
        handle.remove()
