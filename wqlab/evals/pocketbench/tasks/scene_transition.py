"""How does the scene change?"""

from __future__ import annotations

import numpy as np

from wqlab.evals.pocketbench.scene import Builder, Question
from wqlab.evals.pocketbench.words import SCENES
from wqlab.registry import register

TRAINING = ("How does the scene change?", "Which change of scene is shown?", "From what to what does the scene change?")
HELD_OUT = ("What is the right option for how the scene changes?", "What change does the scene go through?")
TRAINING_BRIEF = ("Which scene is shown only briefly?", "Which scene is the shortest?", "One scene is very short. Which one?")
HELD_OUT_BRIEF = ("Which scene is seen only for a short time?", "Which of the scenes is only brief?")


@register("task", "scene_transition")
def make(b: Builder) -> list[Question]:
    """Easy: one change. Hard: three faint scenes, the middle one brief."""
    a, c, other, brief = b.rng.sample(range(len(SCENES)), 4)
    count = b.bystander_count()
    b.bystanders(count, [], b.spots(count))
    weather = np.full(b.num_frames, a, dtype=np.int64)
    at = b.rng.randint(max(1, b.num_frames // 4), max(1, 3 * b.num_frames // 4))
    weather[at:] = c
    b.weather = weather
    if b.hard:
        end = min(b.num_frames, at + 2 * b.passing())
        weather[at:end] = brief
        wrong = [SCENES[a], SCENES[c], SCENES[other]]
        first = b.question("scene_transition", b.say(TRAINING_BRIEF, HELD_OUT_BRIEF), SCENES[brief], wrong, range(at, end))
        return [first, *_ends(b, [a, brief, c], other)]
    right = _change(a, c)
    wrong = [_change(c, a), _change(a, other), _change(other, c)]
    first = b.question("scene_transition", b.say(TRAINING, HELD_OUT), right, wrong, range(b.num_frames))
    return [first, *_ends(b, [a, c], other)]


def _ends(b: Builder, shown: list[int], other: int) -> list[Question]:
    """Return, for training, which scene is first and which is last."""
    rest = [kind for kind in range(len(SCENES)) if kind not in (*shown, other)]
    options = [SCENES[kind] for kind in (*shown, other, *rest)]
    every = range(b.num_frames)
    return [
        b.question("scene_transition", f"Which scene is shown {when}?", right, [o for o in options if o != right][:3], every)
        for when, right in ((("first", options[0]), ("last", options[len(shown) - 1])) if b.training else ())
    ]


def _change(before: int, after: int) -> str:
    return f"from {SCENES[before]} to {SCENES[after]}"
