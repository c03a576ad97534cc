"""KIVI's residual: keys leave it in blocks, values one by one (KIVI, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wqlab.cache.policies import CachePolicy, Split
from wqlab.errors import ParameterError
from wqlab.registry import register


@register("policy", "kivi")
@dataclass(frozen=True)
class KIVIPolicy(CachePolicy):
    """Keys: whole blocks of `residual_length` tokens are encoded, so 0 to R - 1 remain. Values: the newest R always remain.

    A key group spans `window_size` tokens and can only be encoded whole; a value group lies inside one token. A prompt shorter than
    the residual stays in full precision entirely.

    Parameters
    ----------
    residual_length : int
        R, 128 in the paper; a multiple of the window size (the group), so that a block holds whole groups.
    role : {"key", "value"}
        Whose tokens; `for_role` sets it.

    Raises
    ------
    ParameterError
        For a residual that is no multiple of the window size, or another role.
    """

    name = "kivi"
    residual_length: int = 128
    role: str = "key"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need("residual_length", 1)
        if self.residual_length % self.window_size:
            raise ParameterError(
                f"policy kivi: residual_length = {self.residual_length} is no multiple of window_size = {self.window_size}; "
                f"keys are encoded in whole groups, so take {-(-self.residual_length // self.window_size) * self.window_size}"
            )
        if self.role not in ("key", "value"):
            raise ParameterError(f"policy kivi: role = {self.role!r} is neither 'key' nor 'value'")

    def for_role(self, role: str) -> KIVIPolicy:
        """Return the rules of keys or of values."""
        return replace(self, role=role)

    def split(self, num_tokens: int) -> Split:
        """Return no head; encoded are whole blocks of keys, or all values but the newest R."""
        if self.role == "value":
            return Split(0, max(num_tokens - self.residual_length, 0))
        return Split(0, num_tokens // self.residual_length * self.residual_length)

    def max_tail(self) -> int:
        """Return R - 1 for keys, R for values."""
        return self.residual_length - (self.role == "key")
