"""PocketBench: a seeded generator of short videos with four-option questions, easy and hard, whose answering frames are known."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from wqlab.evals.pocketbench.generate import FIRST_TEST_SEED, MIN_FRAMES, VERSION, generator_hash, items, make_item, task_names
from wqlab.evals.pocketbench.scene import LEVELS, SIZE, Item, Question, Scene

if TYPE_CHECKING:
    import torch

__all__ = [
    "FIRST_TEST_SEED", "LEVELS", "MIN_FRAMES", "SIZE", "VERSION", "Item", "Question", "Scene",
    "draw", "generator_hash", "items", "make_item", "task_names",
]  # fmt: skip


@lru_cache(maxsize=2)
def _canvas(device: str) -> object:
    from wqlab.evals.pocketbench.drawing import Canvas

    return Canvas(device)


def draw(videos: Iterable[Item], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the frames of videos of one length, uint8 [videos, frames, 3, 256, 256], drawn on `device`.

    Raises
    ------
    FetchError, DamagedFileError, OutputError
        When the clips whose frames are backgrounds have to be fetched and cannot be.
    """
    canvas = _canvas(str(device))
    return canvas.draw([item.scene for item in videos])  # type: ignore[attr-defined, no-any-return]
