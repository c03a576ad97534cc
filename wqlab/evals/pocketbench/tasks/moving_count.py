"""How many objects move?"""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question, move
from wqlab.evals.pocketbench.words import DIRECTIONS
from wqlab.registry import register

TRAINING = ("How many objects move?", "How many objects are moving?", "Count the moving objects. How many are there?")
HELD_OUT = ("How many of the objects are moving?", "What is the number of moving objects?")


@register("task", "moving_count")
def make(b: Builder) -> list[Question]:
    """Easy: 1 to 4 move, up to 2 stand still. Hard: 2 to 7 move, 3 to 6 stand still."""
    moving = b.rng.randint(2, 7) if b.hard else b.rng.randint(1, 4)
    still = b.rng.randint(3, 6) if b.hard else b.rng.randint(0, 2)
    things = b.things(moving + still, distinct=False)
    spots = b.spots(len(things))
    span = (0, b.num_frames)
    for i, thing in enumerate(things):
        if i >= moving:
            b.place(thing, spots[i])
            continue
        distance = b.rng.uniform(40, 60) if b.hard else b.rng.uniform(60, 100)
        # The direction with the most room, so that its place keeps it apart from the others at least at the start.
        steps = list(DIRECTIONS.values())
        b.rng.shuffle(steps)
        room = [all(16 < p + s * distance < 240 for p, s in zip(spots[i], step, strict=True)) for step in steps]
        step = steps[room.index(True)] if True in room else steps[0]
        move(b.place(thing, spots[i]), step, span, distance)
    low = b.rng.randint(max(1, moving - 3), moving) if b.hard else 1
    wrong = [str(n) for n in range(low, low + 4) if n != moving]
    questions = [b.question("moving_count", b.say(TRAINING, HELD_OUT), str(moving), wrong, range(b.num_frames))]
    if b.training:
        still_ones = [thing.name for thing in things[moving:]]
        wrong = [*still_ones, *(thing.name for thing in b.absent(3))][:3]
        questions.append(b.question("moving_count", "Which object moves?", things[0].name, wrong, range(b.num_frames)))
    return questions
