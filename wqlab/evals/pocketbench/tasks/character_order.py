"""Which character appears first, third, last, or right after another?"""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question
from wqlab.evals.pocketbench.words import LETTERS
from wqlab.registry import register

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
TRAINING = ("Which letter appears {when}?", "What letter is shown {when}?", "Which letter comes {when}?")
HELD_OUT = ("What is the letter that appears {when}?", "Which is the letter shown {when}?")


@register("task", "character_order")
def make(b: Builder) -> list[Question]:
    """Show letters on cards one after another: four large ones, or five to seven small ones anywhere in a crowd."""
    count = b.rng.randint(5, 7) if b.hard else 4
    letters = b.rng.sample(LETTERS, count)
    bystanders = b.bystander_count()
    spots = b.spots(count + bystanders)
    slots = b.slots(count)
    for letter, spot, slot in zip(letters, spots, slots, strict=False):
        radius = b.rng.uniform(14, 18) if b.hard else b.rng.uniform(34, 44)
        spot = (min(max(spot[0], radius + 1), 255 - radius), min(max(spot[1], radius + 1), 255 - radius))
        b.card(letter, b.rng.randrange(b.level.num_colours), spot, slot, radius)
    b.bystanders(min(bystanders, 4), [], spots[count:])
    which = b.rng.randrange(count)
    first = _ask(b, letters, slots, which)
    others = [place for place in range(count) if place != which] if b.training else []
    return [first, *(_ask(b, letters, slots, place) for place in others)]


def _ask(b: Builder, letters: list[str], slots: list[tuple[int, int]], which: int) -> Question:
    frames = list(range(*slots[which]))
    if which and b.rng.random() < 0.4:
        when = f"right after {letters[which - 1]}"
        frames = [*range(*slots[which - 1]), *frames]
    else:
        when = "last" if which == len(letters) - 1 else ORDINALS[which]
    others = [letter for i, letter in enumerate(letters) if i != which and not when.endswith(f"after {letter}")]
    rest = [letter for letter in LETTERS if letter not in letters]
    b.rng.shuffle(others)
    wrong = [*others, *b.rng.sample(rest, 3)][:3]
    return b.question("character_order", b.say(TRAINING, HELD_OUT, when=when), letters[which], wrong, frames)
