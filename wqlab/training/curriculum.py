"""What a step trains on, by how much of the training is done."""

from __future__ import annotations

import math
import random
from typing import NamedTuple


class Step(NamedTuple):
    """One training step.

    Parameters
    ----------
    kind : str
        ``questions``, or a kind of `wqlab.training.captions`.
    num_frames : int
        Of each video.
    """

    kind: str
    num_frames: int


#: (until this share, {step: weight}). From single frames to long videos; descriptions never stop, or the projector forgets detail.
PHASES: tuple[tuple[float, dict[Step, float]], ...] = (
    (0.08, {Step("frames", 1): 4, Step("corners", 1): 1}),
    (
        0.22,
        {
            Step("frames", 1): 2, Step("frames", 4): 2, Step("corners", 2): 0.5, Step("motion", 8): 1.5, Step("timeline", 8): 1,
            Step("weather", 8): 0.3, Step("questions", 8): 5,
        },
    ),
    (
        0.5,
        {
            Step("frames", 1): 0.7, Step("frames", 4): 0.5, Step("frames", 8): 0.5, Step("motion", 8): 0.7, Step("motion", 16): 0.4,
            Step("timeline", 16): 0.7, Step("weather", 16): 0.7, Step("questions", 8): 4, Step("questions", 16): 8,
        },
    ),
    (
        0.85,
        {
            Step("frames", 1): 0.4, Step("frames", 8): 0.4, Step("motion", 16): 0.4, Step("timeline", 32): 0.4,
            Step("weather", 16): 0.4, Step("questions", 16): 4, Step("questions", 32): 6,
        },
    ),
    (
        1.0,
        {
            Step("frames", 1): 0.3, Step("frames", 8): 0.3, Step("timeline", 32): 0.2,
            Step("questions", 16): 2, Step("questions", 32): 4, Step("questions", 64): 1.5, Step("questions", 100): 1.5,
        },
    ),
)  # fmt: skip
#: How often a task is drawn, where not 1: those that were learned last. Chosen after the answers recorded with seed 1000 were seen,
#: so weights that are trained with them have to be reported on another seed.
TASK_WEIGHTS = {
    "action_sequence": 3.0, "character_order": 3.0, "scene_transition": 2.0, "moving_direction": 1.5, "moving_count": 1.5,
    "unexpected_action": 1.5,
}  # fmt: skip
#: Share of videos of the hard level.
HARD_SHARE = 0.55
_WARM_UP_STEPS = 100
_DECAY_FROM = 0.6


def choose(rng: random.Random, done: float) -> Step:
    """Return the next step when the share `done` (0 to 1) of the training is behind."""
    weights = next((steps for until, steps in PHASES if done < until), PHASES[-1][1])
    return rng.choices(list(weights), list(weights.values()))[0]


def rate(step: int, done: float) -> float:
    """Return the factor of the learning rate: a linear warm-up, then constant, then a cosine to 0.02 over the last 40 %."""
    falling = 0.0 if done < _DECAY_FROM else min((done - _DECAY_FROM) / (1 - _DECAY_FROM), 1.0)
    return min(1.0, (step + 1) / _WARM_UP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * falling)))
