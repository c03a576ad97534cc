"""Dense descriptions to train on: every frame and every object has words of its own.

A question's answer is one label for thousands of visual tokens, and a projector never opens on that. A description of single frames
is dozens of labels for 64 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from wqlab.evals.pocketbench.generate import finish
from wqlab.evals.pocketbench.scene import LEVELS, SIZE, Builder, Scene, move
from wqlab.evals.pocketbench.words import COLOUR_NAMES, DIGITS, DIRECTIONS, GLYPHS, SCENES, cell_name, quadrant_name

#: What the description of a video is asked with.
FRAMES, CORNERS = "Describe each frame.", "Name the corners in each frame."
MOTION, TIMELINE = "Describe the motion.", "What appears, in order?"


def frames(b: Builder) -> tuple[str, str]:
    """Show other objects and cards in every frame, and name each with its cell of the grid, in reading order of columns."""
    most = 5 if b.hard else 3
    parts = []
    for t in range(b.num_frames):
        count = b.rng.randint(0 if b.num_frames > 1 else 1, most)
        spots, found = b.spots(count), list[tuple[str, str]]()
        for spot in spots:
            found.append((cell_name(*spot), _place(b, spot, (t, t + 1))))
        parts.append(", ".join(f"{cell} {name}" for cell, name in sorted(found)) or "nothing")
    return FRAMES, _numbered(parts)


def corners(b: Builder) -> tuple[str, str]:
    """The same, with quarters of the picture in place of cells."""
    parts = []
    for t in range(b.num_frames):
        spots = b.spots(b.rng.randint(0 if b.num_frames > 1 else 1, 3))
        found = [(quadrant_name(*spot), _place(b, spot, (t, t + 1))) for spot in spots]
        parts.append(", ".join(f"{corner} {name}" for corner, name in sorted(found)) or "nothing")
    return CORNERS, _numbered(parts)


def motion(b: Builder) -> tuple[str, str]:
    """Move some objects, leave others, and say of each where it goes; then how many move."""
    things = b.things(b.rng.randint(3, 7) if b.hard else b.rng.randint(2, 5), distinct=not b.hard)
    names = list(DIRECTIONS) if b.hard else list(DIRECTIONS)[: b.rng.choice([4, 8])]
    spots, said, moving = b.spots(len(things)), [], 0
    for thing, spot in zip(things, spots, strict=True):
        if b.rng.random() < 0.4:
            b.place(thing, spot)
            said.append((cell_name(*spot), f"{thing.name} stays"))
            continue
        name, distance = b.rng.choice(names), b.rng.uniform(50, 90) if b.hard else b.rng.uniform(70, 140)
        start = b.runway(DIRECTIONS[name], distance)
        move(b.place(thing, start), DIRECTIONS[name], (0, b.num_frames), distance)
        said.append((cell_name(*start), f"{thing.name} moves {name}"))
        moving += 1
    return MOTION, f"{', '.join(text for _, text in sorted(said))}; {moving} move"


def timeline(b: Builder) -> tuple[str, str]:
    """Let objects and cards pass one after another, through scenes, and list them."""
    count = b.rng.randint(3, 6)
    spots = b.spots(count)
    said = [_place(b, spot, slot) for spot, slot in zip(spots, b.slots(count), strict=True)]
    return TIMELINE, ", then ".join(said)


def weather(b: Builder) -> tuple[str, str]:
    """Change the scene a few times and list the scenes."""
    count = min(b.rng.randint(1, 4), b.num_frames)
    kinds = b.rng.sample(range(len(SCENES)), count)
    borders = [0, *sorted(b.rng.sample(range(1, b.num_frames), count - 1)), b.num_frames]
    b.weather = np.concatenate(
        [np.full(end - start, kind, dtype=np.int64) for (start, end), kind in zip(pairwise(borders), kinds, strict=True)]
    )
    b.bystanders(2, [], b.spots(2))
    return "Which scenes are shown, in order?", ", then ".join(SCENES[kind] for kind in kinds)


KINDS: dict[str, Callable[[Builder], tuple[str, str]]] = {
    "frames": frames, "corners": corners, "motion": motion, "timeline": timeline, "weather": weather,
}  # fmt: skip


def make(kind: str, split: str, seed: int, index: int, num_frames: int) -> tuple[Scene, str, str]:
    """Return a scene, what is asked about it, and its description; of training's side of backgrounds and combinations."""
    rng = random.Random(f"caption/{kind}/{split}/{seed}/{index}/{num_frames}")
    builder = Builder(rng, LEVELS[split], num_frames, training=True)
    asked, described = KINDS[kind](builder)
    return finish(builder), asked, described


def _place(b: Builder, spot: tuple[float, float], span: tuple[int, int]) -> str:
    """Place a thing, or a card one time in three, and return its name."""
    if b.rng.random() < 1 / 3:
        colour = b.rng.randrange(b.level.num_colours)
        text = "".join(b.rng.sample(DIGITS, 2)) if b.rng.random() < 0.4 else b.rng.choice(GLYPHS)
        radius = b.rng.uniform(15, 20) if b.hard else b.rng.uniform(30, 42)
        x, y = (min(max(part, radius + 1), SIZE - 1 - radius) for part in spot)
        b.card(text, colour, (x, y), span, radius)
        return f"{COLOUR_NAMES[colour]} card {text}"
    thing = b.things(1)[0]
    b.place(thing, spot, span)
    return thing.name


def _numbered(parts: list[str]) -> str:
    return "; ".join(f"{i + 1}: {part}" for i, part in enumerate(parts)) if len(parts) > 1 else parts[0]
