"""Where is an object? By quarters of the picture, or by cells of an 8 x 8 grid named as on a chess board. Not one of MVBench's."""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import SIZE, Builder, Question
from wqlab.evals.pocketbench.words import QUADRANTS, cell_name, quadrant_name
from wqlab.registry import register

TRAINING = ("Where is the {name}?", "In which {part} is the {name}?", "Which {part} is the {name} in?")
HELD_OUT = ("What is the {part} of the {name}?", "In which {part} can the {name} be seen?")


@register("task", "object_location")
def make(b: Builder) -> list[Question]:
    """Easy: the quarter of a passing object. Hard: the cell, and the wrong options are its neighbours."""
    target = b.things(1)[0]
    if b.hard:
        column, row = b.rng.randrange(8), b.rng.randrange(8)
        spot = tuple(min(max(32 * i + 16 + b.rng.uniform(-6, 6), 14.0), SIZE - 14.0) for i in (column, row))
        right = cell_name(*spot)
        near = [(column + i, row + j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i or j)]
        wrong = [cell_name(32 * c + 16, 32 * r + 16) for c, r in near if 0 <= c < 8 and 0 <= r < 8]
        wrong = b.rng.sample(wrong, 3)
    else:
        quadrant = b.rng.randrange(4)
        spot = tuple(b.rng.uniform(44, 100) + 112 * side for side in (quadrant % 2, quadrant // 2))
        right = quadrant_name(*spot)
        wrong = [name for name in QUADRANTS if name != right]
    span = b.slots(1)[0]
    b.place(target, (spot[0], spot[1]), span)
    count = b.bystander_count()
    spots = [s for s in b.spots(count + 4) if max(abs(s[0] - spot[0]), abs(s[1] - spot[1])) > 2.2 * b.level.radius[1]]
    b.bystanders(min(count, len(spots)), [target], spots)
    text = b.say(TRAINING, HELD_OUT, name=target.name, part="cell" if b.hard else "corner")
    return [b.question("object_location", text, right, wrong, range(*span))]
