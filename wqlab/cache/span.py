"""The policy that encodes one span of the sequence and nothing else: a video between a prompt's text."""

from __future__ import annotations

from dataclasses import dataclass

from wqlab.cache.policies import CachePolicy, Split
from wqlab.errors import ParameterError
from wqlab.registry import register


@register("policy", "span")
@dataclass(frozen=True)
class SpanPolicy(CachePolicy):
    """Encode the whole windows of ``[start, stop)``; text around them and generated tokens stay in full precision.

    Windows are counted from `start`, so with the first visual token there a window never mixes text and video. A last part of the
    span that is shorter than a window stays in full precision, as in WindowQuant.

    Parameters
    ----------
    start, stop : int
        First token of the span, and the token after its last. The default is an empty span, which encodes nothing.
    sink_windows : int
        First windows of the span that are never encoded (WindowQuant, sect. 3.2.2).

    Raises
    ------
    ParameterError
        For an option that is not a whole number inside its limits, or a span that ends before it starts.
    """

    name = "span"
    start: int = 0
    stop: int = 0
    sink_windows: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("start", "stop", "sink_windows"):
            self._need(option, 0)
        if self.stop < self.start:
            raise ParameterError(f"policy span: stop = {self.stop} lies before start = {self.start}; give the token after the last")

    def split(self, num_tokens: int) -> Split:
        """Return all tokens before the first window to encode as head, and the complete windows of the span as encoded."""
        first = self.start + self.sink_windows * self.window_size
        inside = max(min(num_tokens, self.stop) - first, 0)
        return Split(min(num_tokens, first), inside // self.window_size * self.window_size)
