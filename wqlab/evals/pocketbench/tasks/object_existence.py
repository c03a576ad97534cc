"""Which object appears? One of four was there, at some time."""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question
from wqlab.registry import register

TRAINING = ("Which object appears?", "Which object is in the video?", "What can be seen?", "Which of these objects is shown?")
HELD_OUT = ("Which of these objects appears in the video?", "Which object can be seen in the video?")


@register("task", "object_existence")
def make(b: Builder) -> list[Question]:
    """Let objects pass one after another; hard: through a crowd, and the wrong options share colour or shape with what is shown."""
    passing = b.things(4)
    order = b.rng.sample(range(4), 4)
    spots = b.spots(4 + (b.level.crowd[1] if b.hard else 0))
    for slot, which in zip(b.slots(4), order, strict=True):
        b.place(passing[which], spots[which], slot)
    if b.hard:
        b.bystanders(b.bystander_count(), passing, spots[4:])
    target = passing[0]
    wrong = b.absent(3, near=[*b.seen] if b.hard else ())
    text = b.say(TRAINING, HELD_OUT)
    return [b.question("object_existence", text, target.name, [thing.name for thing in wrong], range(*b.seen[target]))]
