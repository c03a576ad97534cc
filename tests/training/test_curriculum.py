"""The curriculum: a plan that is fixed by its settings, and a learning rate that rises, stays and falls."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import ParameterError
from wqlab.training import captions, curriculum
from wqlab.training.pocket import Settings


def test_every_step_can_be_made_and_long_videos_come_last():
    borders = [until for until, _ in curriculum.PHASES]
    assert borders == sorted(borders)
    assert borders[-1] == 1.0
    longest = [max(step.num_frames for step in steps) for _, steps in curriculum.PHASES]
    assert longest == sorted(longest)
    for _, steps in curriculum.PHASES:
        assert all(step.kind in {"questions", *captions.KINDS} for step in steps)


@given(done=st.floats(0, 1))
def test_steps_are_of_the_phase(done):
    step = curriculum.choose(random.Random(0), done)
    phase = next((steps for until, steps in curriculum.PHASES if done < until), curriculum.PHASES[-1][1])
    assert step in phase


def test_the_learning_rate_rises_stays_and_falls():
    rates = [curriculum.rate(step, step / 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[100:600] == [1.0] * 500
    assert all(a >= b for a, b in pairwise(rates[600:]))
    assert curriculum.rate(1000, 1.0) == pytest.approx(0.02)


def test_a_plan_fills_its_steps_and_is_the_same_each_time():
    settings = Settings(steps=500)
    plan = settings.plan()
    assert plan == settings.plan()
    assert [index for index, _, _ in plan] == list(range(500))
    for _, step, count in plan:
        assert count == max(1, settings.tokens_per_step // (step.num_frames * 64 + 64))
    assert Settings(steps=500, seed=2).plan() != plan


def test_settings_refuse_nothing_to_do():
    with pytest.raises(ParameterError, match="steps = 0"):
        Settings(steps=0)
