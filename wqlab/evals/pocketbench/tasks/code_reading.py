"""Which number is on a card? Not one of MVBench's tasks: nothing else needs as much detail."""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question
from wqlab.evals.pocketbench.words import COLOUR_NAMES, DIGITS
from wqlab.registry import register

TRAINING = ("Which number is on the {name} card?", "What number does the {name} card show?", "What is written on the {name} card?")
HELD_OUT = ("What is the number on the {name} card?", "Which number can be read on the {name} card?")


@register("task", "code_reading")
def make(b: Builder) -> list[Question]:
    """Easy: three large cards, a digit each. Hard: five small ones, two digits; the wrong options differ in one of them or both."""
    count = 5 if b.hard else 3
    colours = b.rng.sample(range(b.level.num_colours), count)
    texts = ["".join(b.rng.sample(DIGITS, 2)) if b.hard else digit for digit in b.rng.sample(DIGITS, count)]
    bystanders = min(b.bystander_count(), 4)
    spots, slots = b.spots(count + bystanders, 20 if b.hard else None), b.slots(count)
    order = b.rng.sample(range(count), count)
    for i, colour in enumerate(colours):
        radius = b.rng.uniform(17, 20) if b.hard else b.rng.uniform(32, 42)
        spot = (min(max(spots[i][0], radius + 1), 255 - radius), min(max(spots[i][1], radius + 1), 255 - radius))
        b.card(texts[i], colour, spot, slots[order[i]], radius)
    b.bystanders(bystanders, [], spots[count:])
    asked = range(count if b.training else 1)
    return [_ask(b, texts[i], COLOUR_NAMES[colours[i]], slots[order[i]]) for i in asked]


def _ask(b: Builder, right: str, colour: str, slot: tuple[int, int]) -> Question:
    if b.hard:
        x, y = b.rng.sample([d for d in DIGITS if d not in right], 2)
        wrong = [right[0] + x, y + right[1], y + x]
    else:
        wrong = b.rng.sample([d for d in DIGITS if d != right], 3)
    text = b.say(TRAINING, HELD_OUT, name=colour)
    return b.question("code_reading", text, right, wrong, range(*slot))
