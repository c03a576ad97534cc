"""What happens that does not fit? Objects move together, and one of them does something else."""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question, hide, move, recolour
from wqlab.evals.pocketbench.words import DIRECTIONS, Thing
from wqlab.registry import register

ACTIONS = ("vanishes", "stops", "turns back", "changes color")
TRAINING = ("What unexpected thing happens?", "Something unexpected happens. What is it?", "What happens that was not expected?")
HELD_OUT = ("What unexpected action happens in the video?", "Which unexpected event takes place?")


@register("task", "unexpected_action")
def make(b: Builder) -> list[Question]:
    """Easy: which of four things one object does. Hard: which of two objects does which of two things, in a crowd."""
    step = b.rng.choice(list(DIRECTIONS.values())[:4])
    things = b.things(b.rng.randint(5, 8) if b.hard else 3)
    frames, at = b.num_frames, b.rng.randint(b.num_frames // 3, max(b.num_frames // 3, 2 * b.num_frames // 3))
    distance = 110.0 if b.hard else 140.0
    action = b.rng.choice(ACTIONS)
    # Lanes across the direction keep the objects apart.
    lanes = [28 + (256 - 56) * (i + 0.5) / len(things) for i in range(len(things))]
    b.rng.shuffle(lanes)
    for i, thing in enumerate(things):
        spot = b.runway(step, distance)
        spot = (spot[0], lanes[i]) if step[0] else (lanes[i], spot[1])
        track = b.place(thing, spot)
        if i or action in ("vanishes", "changes color"):
            move(track, step, (0, frames), distance)
        else:
            before = distance * at / frames
            move(track, step, (0, at), before)
            if action == "turns back":
                move(track, (-step[0], -step[1]), (at, frames), before)
        if i == 0 and action == "vanishes":
            hide(track, (at, frames))
        if i == 0 and action == "changes color":
            colour = b.rng.choice([c for c in range(b.level.num_colours) if c not in {t.colour for t in things}] or [0])
            recolour(track, colour, at)
            b.seen[Thing(colour, thing.shape)] = (at, frames)
    text = b.say(TRAINING, HELD_OUT)
    if not b.hard:
        wrong = [f"an object {other}" for other in ACTIONS if other != action]
        return [
            b.question("unexpected_action", text, f"an object {action}", wrong, range(at, frames)),
            *_who(b, things, action, at),
        ]
    other_action, other = b.rng.choice([a for a in ACTIONS if a != action]), things[1]
    wrong = [f"the {things[0].name} {other_action}", f"the {other.name} {action}", f"the {other.name} {other_action}"]
    first = b.question("unexpected_action", text, f"the {things[0].name} {action}", wrong, range(at, frames))
    return [first, *_who(b, things, action, at)]


def _who(b: Builder, things: list[Thing], action: str, at: int) -> list[Question]:
    """Return, for training, which object does it, and what that object does."""
    if not b.training:
        return []
    every, name = range(at, b.num_frames), things[0].name
    wrong = [*(thing.name for thing in things[1:]), *(thing.name for thing in b.absent(1))][:3]
    others = [other for other in ACTIONS if other != action]
    return [
        b.question("unexpected_action", f"Which object {action}?", name, wrong, every),
        b.question("unexpected_action", f"What does the {name} do?", action, others, every),
    ]
