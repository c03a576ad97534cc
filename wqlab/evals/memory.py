"""Bytes really held: walk an object and add up the storages of the tensors that it keeps alive."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn


def held_bytes(root: Any) -> int:
    """Return the bytes of all tensor storages reachable from `root`, each counted once and in full.

    It follows attributes, slots, mappings, sequences, sets and the variables that functions close over, and knows nothing of
    caches: it is the independent check of what a cache says about itself. A small view of a large tensor counts as the large one,
    because that is what stays in memory. Modules are not entered, so that a cache which refers to its model does not count weights.
    """
    seen: dict[int, Any] = {}  # keeps what it saw alive, so that no id is used twice
    storages: dict[tuple[str, int], int] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, type, ModuleType, nn.Module)):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[str(storage.device), storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        waiting += vars(item).values() if hasattr(item, "__dict__") else ()
        waiting += [getattr(item, name, None) for name in getattr(type(item), "__slots__", ())]
        waiting += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
    return sum(storages.values())
