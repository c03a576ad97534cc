"""Descriptions: they name what is shown, where and when it is shown, and nothing that evaluation keeps for itself."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqlab.evals.pocketbench import words
from wqlab.evals.pocketbench.scene import CARD
from wqlab.evals.pocketbench.words import GLYPHS, Thing, cell_name, is_held_out
from wqlab.training import captions


def shown(scene, t):
    """Cell and name of every thing, and of every card with its characters, in frame t."""
    found, open_card = [], None
    for atlas, x, y, _, *rgb, on in scene.sprites[:, t]:
        if not on:
            continue
        if atlas > CARD:
            open_card[2] += GLYPHS[int(atlas) - CARD - 1]
            continue
        colour = next(name for name, value in words.COLOURS.items() if value == tuple(rgb))
        entry = [cell_name(x, y), f"{colour} {words.SHAPES[int(atlas)] if atlas < CARD else 'card'}", ""]
        found.append(entry)
        open_card = entry if atlas == CARD else None
    return found


@given(index=st.integers(0, 5000), split=st.sampled_from(["easy", "hard"]), num_frames=st.sampled_from([1, 4, 8]))
def test_frames_are_described_one_by_one(index, split, num_frames):
    scene, asked, text = captions.make("frames", split, 0, index, num_frames)
    assert asked == captions.FRAMES
    parts = [re.sub(r"^\d+: ", "", part) for part in text.split("; ")]
    assert len(parts) == num_frames
    for t, part in enumerate(parts):
        names = sorted(f"{name} {glyphs}".strip() for _, name, glyphs in shown(scene, t))
        said = sorted(entry.split(" ", 1)[1] for entry in part.split(", ")) if part != "nothing" else []
        assert names == said


@given(index=st.integers(0, 5000), split=st.sampled_from(["easy", "hard"]))
def test_motion_counts_what_moves(index, split):
    scene, _, text = captions.make("motion", split, 0, index, 8)
    moved = np.abs(scene.sprites[:, -1, 1:3] - scene.sprites[:, 0, 1:3]).max(axis=1) > 10
    assert text.endswith(f"; {int(moved.sum())} move")
    assert text.count("moves") == int(moved.sum())


@given(index=st.integers(0, 5000), num_frames=st.sampled_from([8, 16, 32]))
def test_scenes_are_listed_in_order(index, num_frames):
    scene, _, text = captions.make("weather", "easy", 0, index, num_frames)
    changes = [0, *(np.flatnonzero(np.diff(scene.weather)) + 1)]
    assert text == ", then ".join(words.SCENES[scene.weather[t]] for t in changes)


@pytest.mark.parametrize("kind", sorted(captions.KINDS))
@given(index=st.integers(0, 5000), split=st.sampled_from(["easy", "hard"]))
def test_no_description_names_a_combination_that_is_held_out(kind, index, split):
    scene, _, text = captions.make(kind, split, 0, index, 8)
    assert scene.sprites.shape[1] == 8
    held_out = [Thing(c, s).name for c in range(16) for s in range(12) if is_held_out(Thing(c, s))]
    assert not [name for name in held_out if name in text]
