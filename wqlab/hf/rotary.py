"""Rotary positions off and on again, so that a cache can hold keys as they are before them.

A transformers cache is handed keys behind the rotary positions and is told nothing of these. `watch_rotary` listens to the model's
own rotary module, so whatever positions it was asked for (left padding, M-RoPE's three axes, a second turn) are those undone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wqlab.cache.segments import TensorSegments
from wqlab.errors import UnsupportedError

_ATTRIBUTE = "_wqlab_rotary_watch"
#: Kinds whose frequencies depend on the length of the text, so that a held position means another angle later.
_CHANGING = ("dynamic", "longrope")


class RotaryWatch:
    """The positions of the tokens that a model is reading. Made by `watch_rotary`.

    Parameters
    ----------
    module : torch.nn.Module
        Called by the model with ``(hidden_states, position_ids)``; returns cos and sin [batch, seq, rotary_dim].
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._asking = False
        self._new: Tensor | None = None  # int32 [batch, seq] or [batch, seq, axes]
        self._extended: tuple[Tensor | None, Tensor | None, Tensor] | None = None
        self._angles: list[tuple[Tensor, torch.dtype, tuple[Tensor, Tensor]]] = []
        self._handle = module.register_forward_hook(self._heard, with_kwargs=True)

    def remove(self) -> None:
        """Stop listening and leave the model as it was."""
        self._handle.remove()
        delattr(self.module, _ATTRIBUTE)

    def note(self, positions: Tensor) -> None:
        """Say the positions [batch, seq], or [axes, batch, seq], of tokens that come from no pass of the model."""
        self._new = (positions.permute(1, 2, 0) if positions.dim() == 3 else positions).to(torch.int32).contiguous()

    def extend(self, held: Tensor | None, batch: int, count: int) -> Tensor:
        """Return the positions `held` and those of the `count` tokens that are read now, one tensor for all layers.

        Raises
        ------
        UnsupportedError
            When the model was not asked for the positions of so many tokens.
        """
        new = self._new
        if new is None or new.shape[1] != count or new.shape[0] not in (1, batch):
            said = "none" if new is None else f"{new.shape[1]} tokens of {new.shape[0]} rows"
            raise UnsupportedError(
                f"{count} tokens of {batch} rows came to a cache whose model was asked for the positions of {said}; pass the "
                "rotary watch of this very model, or say the positions with assume_positions"
            )
        known = self._extended
        if known is not None and known[1] is new and known[2].shape[0] == batch and _same(known[0], held):
            return known[2]
        rows = new.expand(batch, *new.shape[1:])
        result = rows.contiguous() if held is None else torch.cat([held, rows], dim=1)
        self._extended = (held, new, result)
        return result

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [batch, 1, seq, rotary_dim] of `positions` as the model computes them in `dtype`.

        Raises
        ------
        UnsupportedError
            When the model's module returns another shape.
        """
        for of, computed_in, found in self._angles:
            if of is positions and computed_in == dtype:
                return found
        asked = positions.permute(2, 0, 1) if positions.dim() == 3 else positions
        self._asking = True
        try:
            with torch.no_grad():
                cos, sin = self.module(torch.empty(1, dtype=dtype, device=positions.device), asked.long())
        finally:
            self._asking = False
        if cos.dim() != 3:
            raise UnsupportedError(
                f"{type(self.module).__name__} returns cos of shape {list(cos.shape)}, not [batch, seq, rotary_dim]; use codebooks "
                "for keys behind the rotary positions (rotary='after')"
            )
        result = cos.unsqueeze(1), sin.unsqueeze(1)
        # Of two: every layer of a pass asks for the tokens before it, and for those with the new ones.
        self._angles = [*self._angles[-1:], (positions, dtype, result)]
        return result

    def _heard(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._asking:
            self.note(kwargs["position_ids"] if "position_ids" in kwargs else args[1])


def watch_rotary(model: Any) -> RotaryWatch:
    """Listen to the rotary module of a model's language part; the same watch is returned when it is asked again.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        One with a module ``rotary_emb`` in its decoder, which rotates halves of a head against each other (Llama, Qwen, Mistral and
        what is built on them).

    Raises
    ------
    UnsupportedError
        For a model without it, one that rotates in another way, or whose frequencies change with the length of the text.
    """
    decoder = model.get_decoder()
    module = getattr(decoder, "rotary_emb", None)
    if module is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no rotary_emb in its decoder ({type(decoder).__name__}), so its keys cannot be taken "
            "before the rotary positions; use rotary='after'"
        )
    kind = getattr(module, "rope_type", "default")
    if kind in _CHANGING:
        raise UnsupportedError(f"rope_type {kind!r} changes its frequencies with the length of the text; use rotary='after'")
    found: RotaryWatch | None = getattr(module, _ATTRIBUTE, None)
    if found is None:
        found = RotaryWatch(module)
        try:
            _check_convention(type(decoder).__module__, found)
        except UnsupportedError:
            found._handle.remove()
            raise
        setattr(module, _ATTRIBUTE, found)
    return found


def _check_convention(module_name: str, watch: RotaryWatch) -> None:
    """Compare with the function that the model itself rotates with."""
    theirs: Callable[..., tuple[Tensor, Tensor]] | None = getattr(sys.modules[module_name], "apply_rotary_pos_emb", None)
    if theirs is None:
        raise UnsupportedError(f"{module_name} has no apply_rotary_pos_emb to compare with; use rotary='after'")
    device = next(iter([*watch.module.buffers(), torch.empty(0)])).device
    positions = torch.arange(3, 8, dtype=torch.int32, device=device).unsqueeze(0)
    axes = 3 if hasattr(watch.module, "mrope_section") else 0
    cos, sin = watch.angles(positions.unsqueeze(-1).expand(1, 5, axes).contiguous() if axes else positions, torch.float32)
    key = torch.linspace(-1, 1, 5 * cos.shape[-1], device=device).reshape(1, 1, 5, -1)
    if not torch.allclose(rotate(key, cos, sin), theirs(key, key, cos[:, 0], sin[:, 0])[1], atol=1e-5):
        raise UnsupportedError(f"{module_name} rotates keys in another way than by halves; use rotary='after'")


def rotate(key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return keys [batch, heads, seq, head_dim] with their rotary positions, in their own dtype, computed in float32.

    Channels past `cos`'s last axis have none.
    """
    turned, rest = key[..., : cos.shape[-1]].float(), key[..., cos.shape[-1] :]
    turned = turned * cos.float() + _half_turned(turned) * sin.float()
    return torch.cat([turned.to(key.dtype), rest], dim=-1)


def unrotate(key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return keys [batch, heads, seq, head_dim] without their rotary positions, the inverse of `rotate`.

    A scale that some models put on cos and sin, and what rounding them to the model's dtype does to their length, are divided out.
    """
    turned, rest = key[..., : cos.shape[-1]].float(), key[..., cos.shape[-1] :]
    cos, sin = cos.float(), sin.float()
    turned = (turned * cos - _half_turned(turned) * sin) / (cos.square() + sin.square())
    return torch.cat([turned.to(key.dtype), rest], dim=-1)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is other:
        return True
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


class UnrotatedKeys(TensorSegments):
    """Keys that come and go with their rotary positions and are held without them.

    Full-precision keys are rounded to the storage dtype after their positions were taken off, and once more when these are put on.

    Parameters
    ----------
    watch : RotaryWatch
        Of the model that reads this cache.
    """

    def __init__(self, watch: RotaryWatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = watch
        self.positions: Tensor | None = None  # int32 [batch, seq] or [batch, seq, axes]; shared between layers
        self._extended: Tensor | None = None

    def prepare(self, x: Tensor) -> Tensor:
        """Return `x` without its positions, proven fit for `append`; raises UnsupportedError when they are not known."""
        self._extended = self.watch.extend(self.positions, x.shape[0], x.shape[2])
        cos, sin = self.watch.angles(self._extended, x.dtype)
        return super().prepare(unrotate(x, cos[:, :, len(self) :], sin[:, :, len(self) :]))

    def append(self, prepared: Tensor) -> None:
        """Add tokens that `prepare` returned."""
        self.positions = self._extended
        super().append(prepared)

    def parts(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return head, decoded windows and tail, with their positions."""
        parts = super().parts(dtype)
        if self.positions is None or not parts:
            return parts
        cos, sin = self.watch.angles(self.positions, parts[0].dtype)
        turned, start = [], 0
        for part in parts:
            stop = start + part.shape[2]
            turned.append(rotate(part, cos[:, :, start:stop], sin[:, :, start:stop]))
            start = stop
        return turned

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        super().crop(num_tokens)
        if self.positions is not None:
            self.positions = self.positions[:, : len(self)].contiguous()

    def select_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Pick or repeat batch rows, positions too."""
        super().select_rows(choose)
        if self.positions is not None:
            self.positions = choose(self.positions).contiguous()
