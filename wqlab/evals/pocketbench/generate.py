"""Seeded streams of videos with questions. The same split, seed, index and length give the same video on every machine."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wqlab import registry
from wqlab.errors import ParameterError, UnknownNameError
from wqlab.evals.pocketbench import backgrounds
from wqlab.evals.pocketbench.scene import LEVELS, SIZE, Builder, Item, Question, Scene
from wqlab.evals.pocketbench.words import COLOUR_NAMES, SHAPES

#: Raised whenever the same seed may give another video or question. Results of different versions are not compared.
VERSION = "1.0"
#: Seeds below this one are for development: tuning methods and this generator. Reported results use others.
FIRST_TEST_SEED = 1000
#: Seven letters one after another need as many frames.
MIN_FRAMES = 8


def task_names() -> list[str]:
    """Return the names of all task types, sorted."""
    return registry.names("task")


def items(split: str, seed: int, num_frames: int, start: int = 0, stop: int | None = None) -> Iterator[Item]:
    """Yield evaluation videos `start` to `stop` of a stream (without end where `stop` is None); tasks take turns.

    Parameters
    ----------
    split : {"easy", "hard"}
        The level.
    seed : int
        Which stream; below `FIRST_TEST_SEED` for development.
    num_frames : int
        Length of each video, `MIN_FRAMES` or more.
    start, stop : int
        Range of indices.

    Raises
    ------
    UnknownNameError, ParameterError
        For another split, or fewer frames.
    """
    if split not in LEVELS:
        raise UnknownNameError("split", split, LEVELS)
    if num_frames < MIN_FRAMES:
        raise ParameterError(f"num_frames = {num_frames} is too short for what tasks show one after another: {MIN_FRAMES} or more")
    names, index = task_names(), start
    while stop is None or index < stop:
        yield make_item(split, seed, index, num_frames, names[index % len(names)])
        index += 1


def make_item(split: str, seed: int, index: int, num_frames: int, task: str, training: bool = False) -> Item:
    """Return one video of one task; `training` ones use other backgrounds, templates and combinations than evaluation."""
    rng = random.Random(f"{'train' if training else 'evaluate'}/{split}/{seed}/{index}/{num_frames}/{task}")
    builder = Builder(rng, LEVELS[split], num_frames, training)
    questions = [*registry.lookup("task", task)(builder), *_further(builder)]
    return Item(split, seed, index, num_frames, finish(builder), tuple(questions))


def finish(builder: Builder) -> Scene:
    """Return the scene of a builder, over a background of its side of the bank."""
    rng, frames = builder.rng, builder.num_frames
    pictures = backgrounds.choose(rng, frames, builder.training)
    room = backgrounds.SIDE - SIZE
    return Scene(
        sprites=builder.sprites(),
        backgrounds=pictures,
        crop=(rng.randint(0, room), rng.randint(0, room), rng.randint(0, 1)),
        weather=builder.weather if builder.weather is not None else np.full(frames, _calm(rng), dtype=np.int64),
        strength=builder.level.strength,
    )


def _calm(rng: random.Random) -> int:
    """Return the scene of a video that is not about scenes: mostly the photograph as it is."""
    return rng.randrange(7) if rng.random() < 0.25 else 0


def _further(builder: Builder) -> list[Question]:
    """Return further questions about the same video, whatever its task: which object appears, and a colour or a shape."""
    rng, questions = builder.rng, list[Question]()
    things = list(builder.seen)
    if things:
        thing = rng.choice(things)
        wrong = builder.absent(3, near=things if builder.hard else ())
        text = builder.say(
            ("Which object appears?", "Which of these objects is shown?"), ("Which object can be seen in the video?",)
        )
        span = builder.seen[thing]
        questions.append(builder.question("object_existence", text, thing.name, [t.name for t in wrong], range(*span)))
    rng.shuffle(things)
    for thing in things:
        by_shape = rng.random() < 0.5
        alone = sum(t.shape == thing.shape if by_shape else t.colour == thing.colour for t in things) == 1
        if not alone:
            continue
        if by_shape:
            known, right = COLOUR_NAMES[: builder.level.num_colours], COLOUR_NAMES[thing.colour]
            text = builder.say(("What color is the {name}?",), ("Which color does the {name} have?",), name=SHAPES[thing.shape])
        else:
            known, right = SHAPES[: builder.level.num_shapes], SHAPES[thing.shape]
            text = builder.say(
                ("What shape is the {name} object?",), ("Which shape is the {name} object?",), name=COLOUR_NAMES[thing.colour]
            )
        wrong_names = rng.sample([name for name in known if name != right], 3)
        questions.append(builder.question("attribute", text, right, wrong_names, range(*builder.seen[thing])))
        break
    return questions


def generator_hash() -> str:
    """Return the sha256 over the first videos of each split (tracks, scenes, questions) and the text of the drawing code."""
    digest = hashlib.sha256(VERSION.encode())
    for split in sorted(LEVELS):
        for item in items(split, 0, 16, stop=3 * len(task_names())):
            digest.update(np.round(item.scene.sprites, 2).astype(np.float32).tobytes())
            digest.update(item.scene.backgrounds.tobytes() + item.scene.weather.tobytes())
            digest.update(repr((item.scene.crop, item.scene.strength, item.questions)).encode())
    for name in ("drawing.py", "atlas.py", "backgrounds.py"):
        digest.update((Path(__file__).parent / name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()
