"""How far a long computation is: the floors below report, whoever shows it listens. Silent when nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with what is being counted, how many are done, and how many there are.
Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []


def report(what: str, done: int, total: int) -> None:
    """Tell the listeners that `done` of `total` are finished."""
    for listener in _listeners:
        listener(what, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for every report made inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
