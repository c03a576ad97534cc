"""SKVQ's sliding window: the newest tokens and the first few stay in full precision."""

from __future__ import annotations

from dataclasses import dataclass

from wqlab.cache.policies import CachePolicy, Split
from wqlab.registry import register


@register("policy", "skvq")
@dataclass(frozen=True)
class SKVQPolicy(CachePolicy):
    """Encode what lies between the first `sink_tokens` and the newest `residual_length` tokens, in whole windows.

    The paper lets one token at a time out of its sliding window. Here a window leaves as a whole, so up to ``window_size - 1`` more
    tokens wait; with ``window_size=1`` (which a calibrated quantizer can serve) it is the paper's.

    Parameters
    ----------
    residual_length : int
        The sliding window, 128 in the paper.
    sink_tokens : int
        First tokens that are never encoded, 5 in the paper.
    """

    name = "skvq"
    residual_length: int = 128
    sink_tokens: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need("residual_length", 0)
        self._need("sink_tokens", 0)

    def split(self, num_tokens: int) -> Split:
        """Return the sinks as head, and the whole windows that have left the sliding window as encoded."""
        head = min(num_tokens, self.sink_tokens)
        old = max(num_tokens - head - self.residual_length, 0)
        return Split(head, old // self.window_size * self.window_size)

    def max_tail(self) -> int:
        """Return ``window_size - 1 + residual_length``."""
        return self.window_size - 1 + self.residual_length
