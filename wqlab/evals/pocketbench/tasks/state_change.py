"""What does an object turn into?"""

from __future__ import annotations

from wqlab.evals.pocketbench.scene import Builder, Question, hide, recolour, reglyph
from wqlab.evals.pocketbench.words import COLOUR_NAMES, DIGITS, SHAPES, Thing
from wqlab.registry import register

TRAINING = (
    "What color does the {name} turn?",
    "The {name} changes its color. What color is it then?",
    "Which color does the {name} become?",
)
HELD_OUT = ("What is the color of the {name} after it changes?", "Which color does the {name} change to?")
TRAINING_CARD = (
    "Which number does the {name} card show after it changes?",
    "The number on the {name} card changes. What is it then?",
    "What does the number on the {name} card become?",
)
HELD_OUT_CARD = ("What number is on the {name} card after the change?", "Which number does the {name} card change to?")


@register("task", "state_change")
def make(b: Builder) -> list[Question]:
    """Easy: an object changes colour. Hard: so in a crowd, or the digit on one of several cards changes; both soon vanish."""
    at = b.rng.randint(max(1, b.num_frames // 4), max(1, 3 * b.num_frames // 4))
    end = min(b.num_frames, at + 2 * b.passing()) if b.hard else b.num_frames
    if b.hard and b.rng.random() < 0.5:
        return [_card(b, at, end)]
    target = b.things(1)[0]
    count = b.bystander_count()
    spots = b.spots(count + 1)
    track = b.place(target, spots[0])
    colours = b.rng.sample([c for c in range(b.level.num_colours) if c != target.colour], 3)
    b.seen[Thing(colours[0], target.shape)] = (at, end)
    recolour(track, colours[0], at)
    hide(track, (end, b.num_frames))
    # Nobody else has the target's shape, because the question names it by its shape alone.
    same_shape = [Thing(colour, target.shape) for colour in range(b.level.num_colours)]
    b.bystanders(count, same_shape, spots[1:])
    right, *wrong = (COLOUR_NAMES[colour] for colour in colours)
    text = b.say(TRAINING, HELD_OUT, name=SHAPES[target.shape])
    return [b.question("state_change", text, right, [COLOUR_NAMES[target.colour], *wrong], range(at, end))]


def _card(b: Builder, at: int, end: int) -> Question:
    count = b.rng.randint(3, 5)
    spots = b.spots(count + 2, 18)
    colours = b.rng.sample(range(b.level.num_colours), count)
    digits = b.rng.sample(DIGITS, 4)
    for i, colour in enumerate(colours):
        tracks = b.card(digits[0] if i == 0 else b.rng.choice(DIGITS), colour, spots[i], radius=b.rng.uniform(15, 18))
        if i == 0:
            reglyph(tracks[1], digits[1], at)
            for track in tracks:
                hide(track, (end, b.num_frames))
    b.bystanders(2, [], spots[count:])
    text = b.say(TRAINING_CARD, HELD_OUT_CARD, name=COLOUR_NAMES[colours[0]])
    return b.question("state_change", text, digits[1], [digits[0], *digits[2:]], range(at, end))
