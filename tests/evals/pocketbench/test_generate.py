"""The generator: the same seed gives the same video, and every question has one right answer that the video shows."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqlab import registry
from wqlab.errors import ParameterError, UnknownNameError
from wqlab.evals import pocketbench
from wqlab.evals.pocketbench import backgrounds, words
from wqlab.evals.pocketbench.scene import FIELDS, Builder
from wqlab.evals.pocketbench.words import Thing, cell_name, is_held_out, quadrant_name

SPLITS = ("easy", "hard")
SEEDS = st.integers(0, 10_000)


def first(split, seed, num_frames=16, count=12, training=False):
    names = pocketbench.task_names()
    return [pocketbench.make_item(split, seed, i, num_frames, names[i % len(names)], training) for i in range(count)]


def test_the_tasks_are_those_of_mvbench_and_two_of_our_own():
    mvbench = {
        "action_localization", "action_sequence", "character_order", "moving_attribute", "moving_count", "moving_direction",
        "object_existence", "scene_transition", "state_change", "unexpected_action",
    }  # fmt: skip
    assert set(pocketbench.task_names()) == mvbench | {"code_reading", "object_location"}


@given(seed=SEEDS, split=st.sampled_from(SPLITS), num_frames=st.sampled_from([8, 9, 16, 33, 100]), training=st.booleans())
def test_every_video_is_whole(seed, split, num_frames, training):
    names = pocketbench.task_names()
    item = pocketbench.make_item(split, seed, seed, num_frames, names[seed % len(names)], training)
    sprites = item.scene.sprites
    assert sprites.shape[1:] == (num_frames, FIELDS)
    assert np.isfinite(sprites).all()
    assert set(np.unique(sprites[..., -1])) <= {0.0, 1.0}
    assert (sprites[..., 3] > 0).all()
    assert item.scene.backgrounds.shape == item.scene.weather.shape == (num_frames,)
    assert 0 <= item.scene.weather.min() <= item.scene.weather.max() < len(words.SCENES)
    assert len(item.questions) >= 2
    for question in item.questions:
        assert len(set(question.options)) == 4
        assert set(question.frames) <= set(range(num_frames))
        assert "{" not in question.text


@given(seed=SEEDS, split=st.sampled_from(SPLITS))
def test_the_same_seed_gives_the_same_video(seed, split):
    name = pocketbench.task_names()[seed % 12]
    one, two = (pocketbench.make_item(split, seed, 3, 16, name) for _ in range(2))
    assert one.questions == two.questions
    assert one.scene.crop == two.scene.crop
    np.testing.assert_array_equal(one.scene.sprites, two.scene.sprites)


def test_a_stream_can_be_entered_anywhere():
    whole = list(pocketbench.items("hard", 5, 16, stop=20))
    part = list(pocketbench.items("hard", 5, 16, start=13, stop=20))
    assert [item.questions for item in part] == [item.questions for item in whole[13:]]


@pytest.mark.parametrize("split", SPLITS)
def test_the_right_option_stands_anywhere_and_is_no_favourite(split):
    items = list(pocketbench.items(split, 3, 16, stop=4800))
    places = collections.Counter(item.questions[0].answer for item in items)
    assert min(places.values()) > 1080  # of 1,200 each
    # Whoever has seen half of the answers and gives each option's odds, without looking at a video, stays near chance on the rest.
    for task in pocketbench.task_names():
        asked = [item.questions[0] for item in items if item.questions[0].task == task]
        known, fresh = asked[:200], asked[200:]
        right = collections.Counter(q.options[q.answer] for q in known)
        offered = collections.Counter(option for q in known for option in q.options)
        odds = {option: (right[option] + 1) / (offered[option] + 4) for option in offered}
        guessed = sum(q.options[q.answer] == max(q.options, key=lambda option: odds.get(option, 0.25)) for q in fresh)
        assert guessed / len(fresh) < 0.4, task


@pytest.mark.parametrize("split", SPLITS)
def test_evaluation_shows_other_backgrounds_words_and_combinations_than_training(split):
    trained, evaluated = first(split, 1, count=240, training=True), first(split, 1, count=240)
    assert not {b for item in trained for b in item.scene.backgrounds} & {b for item in evaluated for b in item.scene.backgrounds}

    def templates(items):
        plain = {*words.COLOUR_NAMES, *words.SHAPES}
        return {
            " ".join(word for word in q.text.rstrip("?.").split() if word not in plain) for item in items for q in item.questions
        }

    shared = {text for text in templates(trained) & templates(evaluated) if "right after" not in text}
    assert not shared
    names = {Thing(c, s).name for c in range(16) for s in range(12) if is_held_out(Thing(c, s))}
    asked_in_training = {name for item in trained for q in item.questions for name in (q.text, *q.options)}
    assert not any(name in text.split("the ") or name == text for name in names for text in asked_in_training)
    targets = [q.options[q.answer] for item in evaluated for q in item.questions[:1] if q.task == "object_existence"]
    assert targets
    assert 0.3 < sum(name in names for name in targets) / len(targets) < 0.7


def test_every_colour_and_shape_of_a_level_is_shown_in_training():
    for level in pocketbench.LEVELS.values():
        shown = [Thing(c, s) for c in range(level.num_colours) for s in range(level.num_shapes) if not is_held_out(Thing(c, s))]
        assert {t.colour for t in shown} == set(range(level.num_colours))
        assert {t.shape for t in shown} == set(range(level.num_shapes))


@given(seed=SEEDS, split=st.sampled_from(SPLITS))
def test_what_existence_asks_for_is_there_and_the_others_are_not(seed, split):
    item = pocketbench.make_item(split, seed, 0, 16, "object_existence")
    question = item.questions[0]
    shown = set()
    for t in range(16):
        for atlas, _, _, _, red, green, blue, on in item.scene.sprites[:, t]:
            if on:
                colour = [c for c, rgb in words.COLOURS.items() if rgb == (red, green, blue)]
                shown |= {(f"{name} {words.SHAPES[int(atlas)]}", t) for name in colour if atlas < len(words.SHAPES)}
    right = question.options[question.answer]
    assert {t for name, t in shown if name == right} == set(question.frames)
    assert not {name for name, _ in shown} & (set(question.options) - {right})


@given(seed=SEEDS, split=st.sampled_from(SPLITS))
def test_the_object_asked_for_moves_where_the_answer_says(seed, split):
    item = pocketbench.make_item(split, seed, 0, 16, "moving_direction")
    question = item.questions[0]
    target = item.scene.sprites[-1]  # placed first, drawn last
    dx, dy = target[-1, 1:3] - target[0, 1:3]
    step = words.DIRECTIONS[question.options[question.answer]]
    length = float(np.hypot(dx, dy))
    assert length > 40
    assert (dx * step[0] + dy * step[1]) / length > 0.98


@given(seed=SEEDS, split=st.sampled_from(SPLITS))
def test_as_many_move_as_the_answer_says(seed, split):
    item = pocketbench.make_item(split, seed, 0, 16, "moving_count")
    question = item.questions[0]
    tracks = item.scene.sprites
    moved = np.abs(tracks[:, -1, 1:3] - tracks[:, 0, 1:3]).max(axis=1) > 10
    assert str(int(moved.sum())) == question.options[question.answer]


@given(x=st.floats(0, 255.9), y=st.floats(0, 255.9))
def test_places_have_names(x, y):
    name = cell_name(x, y)
    column, row = "ABCDEFGH".index(name[0]), int(name[1]) - 1
    assert 32 * column <= x < 32 * (column + 1)
    assert 32 * row <= y < 32 * (row + 1)
    assert quadrant_name(x, y) == f"{'bottom' if y >= 128 else 'top'} {'right' if x >= 128 else 'left'}"


def test_bad_input_is_refused_by_name():
    with pytest.raises(UnknownNameError, match=r"esay.*easy"):
        next(pocketbench.items("esay", 0, 8))
    with pytest.raises(ParameterError, match="num_frames = 7"):
        next(pocketbench.items("easy", 0, 7))


def test_a_new_task_is_one_new_file(monkeypatch, tmp_path):
    package = tmp_path / "my_tasks"
    package.mkdir()
    (package / "__init__.py").write_text('"""Mine."""\n')
    (package / "sameness.py").write_text(
        "from wqlab.registry import register\n"
        "@register('task', 'sameness')\n"
        "def make(b):\n"
        "    thing = b.things(1)[0]\n"
        "    b.place(thing, (100.0, 100.0))\n"
        "    return [b.question('sameness', 'What stays?', thing.name, ['a', 'b', 'c'], range(b.num_frames))]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._PACKAGES, "task", [*registry._PACKAGES["task"], "my_tasks"])
    monkeypatch.setattr(registry, "_ENTRIES", {**registry._ENTRIES, "task": dict(registry._ENTRIES["task"])})
    assert "sameness" in pocketbench.task_names()
    assert pocketbench.make_item("easy", 0, 0, 8, "sameness").questions[0].text == "What stays?"


def test_backgrounds_of_the_two_sides_cover_the_bank_once():
    groups = [index for training in (True, False) for group in backgrounds._groups(training) for index in group]
    assert sorted(groups) == list(range(len(backgrounds.bank())))


def test_a_builder_without_room_still_places_everything():
    import random

    b = Builder(random.Random(0), pocketbench.LEVELS["easy"], 8, training=True)
    assert len(b.spots(30)) == 30
