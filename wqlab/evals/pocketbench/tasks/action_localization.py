"""When in the video is an object seen?"""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question
from wqlab.evals.pocketbench.words import Thing
from wqlab.registry import register

EASY = ("at the beginning", "in the middle", "at the end", "all the time")
HARD = ("in the first quarter", "in the second quarter", "in the third quarter", "in the last quarter")
TRAINING = ("When is the {name} seen?", "When does the {name} appear?", "In which part of the video is the {name}?")
HELD_OUT = ("During which part of the video can the {name} be seen?", "When can the {name} be seen?")


@register("task", "action_localization")
def make(b: Builder) -> list[Question]:
    """Easy: beginning, middle, end or all the time. Hard: which quarter, briefly, while near-identical objects pass in others."""
    frames = b.num_frames
    options = HARD if b.hard else EASY
    which = b.rng.randrange(4)
    things = b.things(1)
    spots = b.spots(5 + b.level.crowd[1])
    length = min(2 * b.passing(), max(1, frames // 4))
    b.place(things[0], spots[0], _span(b, which, length))
    asked = [(things[0], which)]
    for part in range(3) if not b.hard else [p for p in range(4) if p != which]:
        thing = b.absent(1, near=things if b.hard else ())[0]
        b.place(thing, spots[1 + part], _span(b, part, length))
        asked.append((thing, part))
    if b.hard:
        b.bystanders(b.bystander_count(), things, spots[5:])
    return [_ask(b, thing, options[part], options) for thing, part in (asked if b.training else asked[:1])]


def _ask(b: Builder, thing: Thing, right: str, options: tuple[str, ...]) -> Question:
    text = b.say(TRAINING, HELD_OUT, name=thing.name)
    return b.question("action_localization", text, right, [o for o in options if o != right], range(*b.seen[thing]))


def _span(b: Builder, part: int, length: int) -> tuple[int, int]:
    """Return a span of frames inside a part of the video: a quarter (hard), or beginning, middle, end and all (easy)."""
    frames = b.num_frames
    if not b.hard and part == 3:
        return 0, frames
    if b.hard:
        low, high = part * frames // 4, max((part + 1) * frames // 4, part * frames // 4 + 1)
    else:
        low, high = (part * frames * 3 // 8, max(part * frames * 3 // 8 + 1, part * frames * 3 // 8 + frames // 4))
    start = b.rng.randint(low, max(low, high - length))
    return start, min(start + length, high)
