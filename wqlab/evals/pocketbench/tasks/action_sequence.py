"""What does an object do first, last, or after something else?"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from wqlab.evals.pocketbench.scene import SIZE, Builder, Question, move, resize
from wqlab.evals.pocketbench.words import DIRECTIONS, Thing
from wqlab.registry import register

ACTIONS = ("moves left", "moves right", "moves up", "moves down", "grows", "shrinks")
TRAINING = ("What does the {name} do {when}?", "Which action does the {name} do {when}?")
HELD_OUT = ("What is the action that the {name} does {when}?",)


@register("task", "action_sequence")
def make(b: Builder) -> list[Question]:
    """Let one object act three times (hard: four times, among a crowd) and ask for one action by its order."""
    count = b.bystander_count()
    # In the middle, because four moves in a row may go the same way.
    target = b.things(1)[0]
    middle = SIZE / 2 + b.rng.uniform(-20, 20), SIZE / 2 + b.rng.uniform(-20, 20)
    track = b.place(target, middle)
    b.bystanders(count, [target], b.spots(count))
    performed = b.rng.sample(ACTIONS, 4 if b.hard else 3)
    spans = _parts(b.num_frames, len(performed))
    for action, span in zip(performed, spans, strict=True):
        if action == "grows":
            resize(track, 1.8, span)
        elif action == "shrinks":
            resize(track, 0.5, span)
        else:
            move(track, DIRECTIONS[action.removeprefix("moves ")], span, b.rng.uniform(50, 70) if b.hard else b.rng.uniform(60, 80))
    which = b.rng.randrange(len(performed))
    first = _ask(b, target, performed, spans, which)
    others = [place for place in range(len(performed)) if place != which] if b.training else []
    return [first, *(_ask(b, target, performed, spans, place) for place in others)]


def _ask(b: Builder, target: Thing, performed: list[str], spans: list[tuple[int, int]], which: int) -> Question:
    frames = list(range(*spans[which]))
    if which and b.rng.random() < 0.5:
        when = f"right after it {performed[which - 1]}"
        frames = [*range(*spans[which - 1]), *frames]
    else:
        when = "last" if which == len(performed) - 1 else ("first", "second", "third")[which]
    others = [action for action in performed if action != performed[which]]
    idle = [action for action in ACTIONS if action not in performed]
    wrong = [*b.rng.sample(others, 2), b.rng.choice(idle)]
    text = b.say(TRAINING, HELD_OUT, name=target.name, when=when)
    return b.question("action_sequence", text, performed[which], wrong, frames)


def _parts(num_frames: int, count: int) -> list[tuple[int, int]]:
    borders = np.linspace(0, num_frames, count + 1).round().astype(int).tolist()
    return [(start, max(end, start + 1)) for start, end in pairwise(borders)]
