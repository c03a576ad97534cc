"""In which direction does an object move?"""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question, move
from wqlab.evals.pocketbench.words import DIRECTIONS, Thing
from wqlab.registry import register

TRAINING = ("In which direction does the {name} move?", "Which way does the {name} go?", "Where does the {name} move to?")
HELD_OUT = ("What is the moving direction of the {name}?", "Which direction is the {name} moving in?")


@register("task", "moving_direction")
def make(b: Builder) -> list[Question]:
    """Easy: four directions, the others stand still. Hard: eight directions, the others move too, during a part of the video."""
    names = list(DIRECTIONS) if b.hard else list(DIRECTIONS)[:4]
    things = b.things(1 + min(b.bystander_count(), 6))
    spots = b.spots(len(things))
    moving: list[tuple[Thing, str, tuple[int, int]]] = []
    for i, thing in enumerate(things):
        name = b.rng.choice(names)
        if i and not b.hard:
            b.place(thing, spots[i])
            continue
        distance = b.rng.uniform(60, 90) if b.hard else b.rng.uniform(90, 140)
        start = b.rng.randrange(b.num_frames // 2 + 1) if b.hard else 0
        span = (start, min(start + max(b.num_frames // 2, 2), b.num_frames)) if b.hard else (0, b.num_frames)
        step = DIRECTIONS[name]
        move(b.place(thing, b.runway(step, distance)), step, span, distance)
        moving.append((thing, name, span))
    return [_ask(b, *track, names) for track in (moving if b.training else moving[:1])]


def _ask(b: Builder, thing: Thing, right: str, span: tuple[int, int], names: list[str]) -> Question:
    wrong = b.rng.sample([name for name in names if name != right], 3)
    text = b.say(TRAINING, HELD_OUT, name=thing.name)
    return b.question("moving_direction", text, right, wrong, range(*span))
