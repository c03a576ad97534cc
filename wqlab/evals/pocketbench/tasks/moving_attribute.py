"""What colour, or what shape, is the object that moves? The others stand still."""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question, move
from wqlab.evals.pocketbench.words import COLOUR_NAMES, DIRECTIONS, SHAPES, Thing
from wqlab.registry import register

TRAINING = (
    "What {attribute} is the moving object?",
    "What is the {attribute} of the object that moves?",
    "One object moves. What is its {attribute}?",
)
HELD_OUT = ("Which {attribute} does the moving object have?", "What is the {attribute} of the moving object?")


@register("task", "moving_attribute")
def make(b: Builder) -> list[Question]:
    """Move one object among bystanders; the wrong options are theirs first."""
    target = b.things(1)[0]
    step = b.rng.choice(list(DIRECTIONS.values()))
    distance = b.rng.uniform(50, 80) if b.hard else b.rng.uniform(90, 140)
    span = (0, b.num_frames)
    move(b.place(target, b.runway(step, distance), span), step, span, distance)
    count = b.bystander_count()
    others = b.bystanders(count, [target], b.spots(count))
    attribute = b.rng.choice(["color", "shape"])
    asked = [attribute, "shape" if attribute == "color" else "color"] if b.training else [attribute]
    return [_ask(b, target, others, attribute) for attribute in asked]


def _ask(b: Builder, target: Thing, others: list[Thing], attribute: str) -> Question:
    if attribute == "color":
        right, seen, known = (
            COLOUR_NAMES[target.colour],
            [COLOUR_NAMES[o.colour] for o in others],
            COLOUR_NAMES[: b.level.num_colours],
        )
    else:
        right, seen, known = SHAPES[target.shape], [SHAPES[o.shape] for o in others], SHAPES[: b.level.num_shapes]
    rest = [name for name in known if name != right and name not in seen]
    b.rng.shuffle(rest)
    wrong = [name for name in dict.fromkeys([*seen, *rest]) if name != right][:3]
    return b.question("moving_attribute", b.say(TRAINING, HELD_OUT, attribute=attribute), right, wrong, range(b.num_frames))
