"""Drawing: what the orders say is in the pixels."""

import random

import numpy as np
import pytest
import torch

from wqlab.evals import pocketbench
from wqlab.evals.pocketbench import atlas, words
from wqlab.evals.pocketbench.drawing import Canvas, orders
from wqlab.evals.pocketbench.generate import finish
from wqlab.evals.pocketbench.scene import CARD, Builder
from wqlab.evals.pocketbench.words import Thing


@pytest.fixture(scope="module")
def canvas():
    return Canvas("cpu")


def empty(num_frames=2):
    return Builder(random.Random(0), pocketbench.LEVELS["easy"], num_frames, training=True)


def test_masks_cover_every_shape_card_and_character():
    masks = atlas.masks()
    assert masks.shape == (CARD + 1 + len(words.GLYPHS), 2, atlas.SIDE, atlas.SIDE)
    assert masks.min() >= 0
    assert masks.max() <= 1
    assert (masks[:, 0].mean((1, 2)) > 0.05).all()
    assert (masks[: CARD + 1, 0] >= masks[: CARD + 1, 1] - 1e-6).all()  # the outline lies around the fill
    flat = masks[:, 0].flatten(1)
    distances = torch.cdist(flat, flat) + 1e9 * torch.eye(len(flat))
    assert distances.min() > 1  # no two look the same


@pytest.mark.parametrize("shape", range(len(words.SHAPES)))
def test_a_sprite_has_its_colour_at_its_place_and_changes_nothing_else(canvas, shape):
    b = empty()
    b.place(Thing(0, shape), (100.0, 60.0), (1, 2), radius=20.0)
    scene = finish(b)
    frames = canvas.draw([scene])[0].int()
    changed = (frames[1] - frames[0]).abs().amax(0) > 60  # the same photograph, other noise
    rows, columns = changed.nonzero().T
    assert len(rows) > 100
    assert rows.min() >= 60 - 26
    assert rows.max() <= 60 + 26
    assert columns.min() >= 100 - 26
    assert columns.max() <= 100 + 26
    red = torch.tensor(words.COLOURS["red"])[:, None, None]
    assert ((frames[1] - red).abs().amax(0) < 16).sum() > 150


def test_orders_hold_exactly_the_visible_sprites_in_drawing_order():
    items = list(pocketbench.items("hard", 0, 8, stop=6))
    found = orders([item.scene for item in items])
    assert sum(found.layers) == len(found.sprites) == sum(int((item.scene.sprites[..., -1] > 0).sum()) for item in items)
    for frame in range(6 * 8):
        scene = items[frame // 8].scene
        mine = found.sprites[found.where == frame].numpy()
        np.testing.assert_array_equal(mine, scene.sprites[:, frame % 8][scene.sprites[:, frame % 8, -1] > 0])


def test_the_first_placed_lies_on_top(canvas):
    b = empty()
    b.place(Thing(0, 1), (128.0, 128.0), radius=20.0)
    b.place(Thing(2, 1), (128.0, 128.0), radius=30.0)
    frame = canvas.draw([finish(b)])[0, 0].int()
    assert (frame[:, 128, 128] - torch.tensor(words.COLOURS["red"])).abs().max() < 20
    assert (frame[:, 128, 128 + 22] - torch.tensor(words.COLOURS["blue"])).abs().max() < 20


def test_scenes_look_different(canvas):
    pictures = []
    for kind in range(len(words.SCENES)):
        b = empty()
        b.weather = np.full(2, kind)
        pictures.append(canvas.draw([finish(b)])[0, 0].float())
    for i, one in enumerate(pictures):
        for other in pictures[i + 1 :]:
            assert (one - other).abs().mean() > 5


def test_a_batch_is_drawn_as_its_videos_are(canvas):
    scenes = [item.scene for item in pocketbench.items("easy", 2, 8, stop=3)]
    together = canvas.draw(scenes).int()
    for i, scene in enumerate(scenes):
        assert torch.equal(together[i], canvas.draw([scene])[0].int())


def test_a_sprite_may_lie_partly_outside(canvas):
    b = empty()
    b.place(Thing(0, 0), (2.0, 254.0), radius=30.0)
    b.place(Thing(1, 0), (300.0, -40.0), radius=30.0)
    frame = canvas.draw([finish(b)])[0, 0].int()
    assert (frame[:, 250, 4] - torch.tensor(words.COLOURS["red"])).abs().max() < 20


def test_the_repository_names_the_generator_that_it_has():
    import json

    from wqlab import paths

    noted = json.loads((paths.shipped("data") / "pocketbench.json").read_text())
    assert noted["version"] == pocketbench.VERSION
    assert noted["sha256"] == pocketbench.generator_hash(), "the generator changed: raise VERSION, write data/pocketbench.json anew"
