"""Cache policies: which tokens of a sequence stay in full precision, and when the rest is encoded.

A policy is arithmetic on token counts; it sees no values and no tensors. `split` says how a sequence of `num_tokens` should lie:
a full-precision head, then encoded tokens, then a full-precision tail. It must be monotone: with more tokens, neither the head
nor the encoded part may shrink, because an encoded window is never encoded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from wqlab import registry
from wqlab.errors import ParameterError
from wqlab.registry import register


class Split(NamedTuple):
    """How many tokens, from the front: `head` in full precision, then `encoded`; the rest is the full-precision tail."""

    head: int
    encoded: int


@dataclass(frozen=True)
class CachePolicy(ABC):
    """Base of all policies. A frozen dataclass: its fields are its options.

    Parameters
    ----------
    window_size : int
        Tokens per window; only whole windows are encoded.

    Raises
    ------
    ParameterError
        For an option that is not a whole number inside its limits.
    """

    name: ClassVar[str]
    window_size: int = 32

    def __post_init__(self) -> None:
        self._need("window_size", 1)

    @abstractmethod
    def split(self, num_tokens: int) -> Split:
        """Return how `num_tokens` tokens should lie; ``encoded`` is a multiple of the window size."""

    def for_role(self, role: str) -> CachePolicy:
        """Return the policy for one side, ``"key"`` or ``"value"``; most treat both alike."""
        return self

    def max_tail(self) -> int | None:
        """Return the most full-precision tokens that ever stand behind the encoded ones, or None without a bound."""
        return None

    def _need(self, option: str, least: int) -> None:
        value = getattr(self, option)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ParameterError(f"policy {self.name}: {option} = {value!r} is not a whole number, {least} or more")


@register("policy", "full")
@dataclass(frozen=True)
class FullPolicy(CachePolicy):
    """Encode nothing: the full-precision baseline, through the same code as the rest."""

    name = "full"

    def split(self, num_tokens: int) -> Split:
        """Return no head and nothing encoded."""
        return Split(0, 0)


@register("policy", "windowed")
@dataclass(frozen=True)
class WindowedPolicy(CachePolicy):
    """Encode each complete window once `residual_length` newer tokens exist.

    Parameters
    ----------
    residual_length : int
        Newest tokens that stay in full precision; 0 encodes a window as soon as it is complete.
    sink_windows : int
        First windows that are never encoded, because first tokens collect attention (WindowQuant, sect. 3.2.2).
    """

    name = "windowed"
    residual_length: int = 0
    sink_windows: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need("residual_length", 0)
        self._need("sink_windows", 0)

    def split(self, num_tokens: int) -> Split:
        """Return the sink windows as head, and all complete windows old enough behind them as encoded."""
        head = min(num_tokens, self.sink_windows * self.window_size)
        old = max(num_tokens - head - self.residual_length, 0)
        return Split(head, old // self.window_size * self.window_size)

    def max_tail(self) -> int:
        """Return ``window_size - 1 + residual_length``."""
        return self.window_size - 1 + self.residual_length


def create(policy: str, **options: Any) -> CachePolicy:
    """Return the policy registered as `policy` with `options`.

    Raises
    ------
    UnknownNameError
        For a policy that does not exist.
    ParameterError
        For an option it does not have, or a value outside its limits.
    """
    found: type[CachePolicy] = registry.lookup("policy", policy)
    known = list(found.__dataclass_fields__)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ParameterError(f"policy {policy} has no option {unknown[0]!r}; it has: {', '.join(known)}")
    return found(**options)
