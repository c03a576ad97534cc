"""A video before it is drawn: tracks of sprites, a background and a scene per frame, and the questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wqlab.evals.pocketbench.words import COLOUR_NAMES, COLOURS, GLYPHS, SHAPES, Thing, is_held_out

#: Pixels of a side; 8 x 8 visual tokens of 32 x 32 pixels.
SIZE = 256
#: Index of the card in the atlas; shapes come before it, characters after it.
CARD = len(SHAPES)
#: Fields of a sprite in a frame: atlas index, centre x, centre y, radius (pixels), red, green, blue (0 to 255), visible (0 or 1).
FIELDS = 8
_ATLAS, _X, _Y, _R, _RGB, _ON = 0, 1, 2, 3, slice(4, 7), 7


class Level(NamedTuple):
    """How hard the videos of a split are.

    Parameters
    ----------
    num_colours, num_shapes : int
        Of `words`, from the first on.
    radius : tuple of float
        Smallest and largest, in pixels.
    crowd : tuple of int
        Fewest and most bystanders in a frame.
    share : float
        Of the video, that a passing object is seen.
    strength : float
        Of scenes such as fog, 0 to 1.
    """

    num_colours: int
    num_shapes: int
    radius: tuple[float, float]
    crowd: tuple[int, int]
    share: float
    strength: float


LEVELS = {
    "easy": Level(8, 6, (24.0, 36.0), (1, 3), 1 / 8, 1.0),
    "hard": Level(16, 12, (11.0, 15.0), (5, 9), 1 / 16, 0.6),
}


@dataclass(frozen=True)
class Question:
    """A question with four options.

    Parameters
    ----------
    task : str
        The task type, one of `task_names`.
    text : str
        The question alone.
    options : tuple of str
        Four different answers, shuffled.
    answer : int
        Index of the right one.
    frames : tuple of int
        The frames that answer it; a plan that keeps these windows precise keeps what the answer needs.
    """

    task: str
    text: str
    options: tuple[str, ...]
    answer: int
    frames: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.options)) != 4 or self.answer not in range(4) or not self.frames:
            raise ValueError(f"{self.task}: not a question with four different options, an answer and its frames: {self}")


@dataclass(frozen=True)
class Scene:
    """One video's drawing orders.

    Parameters
    ----------
    sprites : ndarray
        float32 [sprites, frames, FIELDS], drawn in order.
    backgrounds : ndarray
        int64 [frames]: pictures of the bank.
    crop : tuple of int
        Left and top of the 256 x 256 part of the picture, and 1 where it is mirrored.
    weather : ndarray
        int64 [frames]: index into `words.SCENES`.
    strength : float
        Of the weather, 0 to 1.
    """

    sprites: np.ndarray[Any, Any]
    backgrounds: np.ndarray[Any, Any]
    crop: tuple[int, int, int]
    weather: np.ndarray[Any, Any]
    strength: float


@dataclass(frozen=True)
class Item:
    """A video and its questions.

    Parameters
    ----------
    split : {"easy", "hard"}
        Its level.
    seed, index : int
        Which video of which stream.
    num_frames : int
        Its length.
    scene : Scene
        What `draw` draws.
    questions : tuple of Question
        The first is the one that is scored; `multi_turn` asks and answers the second before it.
    """

    split: str
    seed: int
    index: int
    num_frames: int
    scene: Scene
    questions: tuple[Question, ...]


@dataclass
class Builder:
    """Lets a task place sprites, and keeps who was seen when, for further questions.

    Parameters
    ----------
    rng : random.Random
        The only source of chance.
    level : Level
        Of the split.
    num_frames : int
        Length of the video.
    training : bool
        Whether held-out combinations are forbidden (training) or asked for (evaluation).
    """

    rng: random.Random
    level: Level
    num_frames: int
    training: bool
    #: Groups of tracks (a thing; a card with its characters). The first placed lies on top: a task places its target first.
    groups: list[list[np.ndarray[Any, Any]]] = field(default_factory=list)
    weather: np.ndarray[Any, Any] | None = None
    #: Things in the video -> first and last frame + 1 in which they are seen.
    seen: dict[Thing, tuple[int, int]] = field(default_factory=dict)

    def things(self, count: int, distinct: bool = True) -> list[Thing]:
        """Return `count` different things, the first of them the question's target.

        With `distinct`, no two share a colour or a shape as long as there are enough of both. Training shows no held-out
        combination; in evaluation the first is one half of the time, and so is a wrong option (`absent`): that tells nothing.
        """
        found: list[Thing] = []
        tries, new = 0, self._asks_for_new()
        while len(found) < count:
            tries += 1
            thing = Thing(self.rng.randrange(self.level.num_colours), self.rng.randrange(self.level.num_shapes))
            if is_held_out(thing) if self.training else (not found and is_held_out(thing) != new):
                continue
            clash = any(thing.colour == other.colour or thing.shape == other.shape for other in found)
            if thing in found or (distinct and clash and tries < 60):
                continue
            found.append(thing)
        return found

    def absent(self, count: int, near: Sequence[Thing] = ()) -> list[Thing]:
        """Return `count` things that the video does not show; each shares colour or shape with one of `near`, where given."""
        found: list[Thing] = []
        tries, new = 0, self._asks_for_new()
        while len(found) < count:
            tries += 1
            thing = Thing(self.rng.randrange(self.level.num_colours), self.rng.randrange(self.level.num_shapes))
            if near:
                model = self.rng.choice(list(near))
                thing = Thing(model.colour, thing.shape) if self.rng.random() < 0.5 else Thing(thing.colour, model.shape)
            # Few combinations are held out; after many tries any of them will do.
            wanted = is_held_out(thing) == new or (tries > 60 and not self.training)
            if wanted and thing not in found and thing not in self.seen:
                found.append(thing)
                tries, new = 0, self._asks_for_new()
        return found

    def _asks_for_new(self) -> bool:
        return not self.training and self.rng.random() < 0.5

    @property
    def hard(self) -> bool:
        """Whether this is the hard split."""
        return self.level is LEVELS["hard"]

    def say(self, training: Sequence[str], held_out: Sequence[str], **names: object) -> str:
        """Return one of the templates with its names filled in; evaluation asks in words that training never used."""
        return self.rng.choice(list(training if self.training else held_out)).format(**names)

    def bystander_count(self) -> int:
        """Return how many bystanders a frame of the level holds."""
        return self.rng.randint(*self.level.crowd)

    def runway(self, step: tuple[float, float], distance: float) -> tuple[float, float]:
        """Return a place from which a thing can travel `distance` pixels along `step` without leaving the picture."""
        low, high = self.level.radius[1] + 2, SIZE - self.level.radius[1] - 2
        x, y = (self.rng.uniform(low - min(part * distance, 0), high - max(part * distance, 0)) for part in step)
        return x, y

    def radius(self) -> float:
        """Return a radius of the level."""
        return self.rng.uniform(*self.level.radius)

    def spots(self, count: int, radius: float | None = None) -> list[tuple[float, float]]:
        """Return `count` places, inside the picture and apart from each other as far as there is room."""
        reach = radius or self.level.radius[1]
        gap, found = 2.2 * reach, list[tuple[float, float]]()
        while len(found) < count:
            for _ in range(40):
                spot = self.rng.uniform(reach + 2, SIZE - reach - 2), self.rng.uniform(reach + 2, SIZE - reach - 2)
                if all(max(abs(spot[0] - x), abs(spot[1] - y)) >= gap for x, y in found):
                    found.append(spot)
                    break
            else:
                gap *= 0.8
        return found

    def passing(self) -> int:
        """Return for how many frames a passing object is seen."""
        return min(self.num_frames, max(2, round(self.num_frames * self.level.share)))

    def slots(self, count: int) -> list[tuple[int, int]]:
        """Return `count` spans of frames that do not overlap, in order, each as long as `passing` where there is room."""
        length = min(self.passing(), max(1, self.num_frames // count))
        free = self.num_frames - count * length
        starts = sorted(self.rng.randrange(free + 1) for _ in range(count))
        return [(start + i * length, start + (i + 1) * length) for i, start in enumerate(starts)]

    def place(
        self, thing: Thing, spot: tuple[float, float], span: tuple[int, int] | None = None, radius: float | None = None
    ) -> np.ndarray[Any, Any]:
        """Add a thing, still at `spot` during `span` (default: always), and return its track [frames, FIELDS] to change."""
        span = span or (0, self.num_frames)
        track = self._track(thing.shape, spot, radius or self.radius(), COLOURS[COLOUR_NAMES[thing.colour]], span)
        self.seen[thing] = span
        self.groups.append([track])
        return track

    def sprites(self) -> np.ndarray[Any, Any]:
        """Return all tracks in drawing order, float32 [sprites, frames, FIELDS]."""
        tracks = [track for group in reversed(self.groups) for track in group]
        return np.stack(tracks) if tracks else np.zeros((0, self.num_frames, FIELDS), dtype=np.float32)

    def card(
        self, text: str, colour: int, spot: tuple[float, float], span: tuple[int, int] | None = None, radius: float | None = None
    ) -> list[np.ndarray[Any, Any]]:
        """Add a card of a colour with one or two characters on it; return the tracks of the card and of each character."""
        span, radius = span or (0, self.num_frames), radius or self.radius()
        rgb = COLOURS[COLOUR_NAMES[colour]]
        group = [self._track(CARD, spot, radius, rgb, span)]
        ink = (250, 250, 250) if luminance(rgb) < 120 else (10, 10, 10)
        shift = 0.42 * radius if len(text) == 2 else 0.0
        size = radius * (0.78 if len(text) == 1 else 0.66)
        for place, glyph in zip((-shift, shift) if len(text) == 2 else (0.0,), text, strict=True):
            group.append(self._track(CARD + 1 + GLYPHS.index(glyph), (spot[0] + place, spot[1]), size, ink, span))
        self.groups.append(group)
        return group

    def _track(
        self, atlas: int, spot: tuple[float, float], radius: float, rgb: tuple[int, int, int], span: tuple[int, int]
    ) -> np.ndarray[Any, Any]:
        track = np.zeros((self.num_frames, FIELDS), dtype=np.float32)
        track[:, _ATLAS], track[:, _X], track[:, _Y], track[:, _R], track[:, _RGB] = atlas, *spot, radius, rgb
        track[span[0] : span[1], _ON] = 1.0
        return track

    def bystanders(self, count: int, avoid: Sequence[Thing], spots: Sequence[tuple[float, float]]) -> list[Thing]:
        """Add `count` things that stand still all the time at `spots`, none of them in `avoid`, and return them."""
        found: list[Thing] = []
        while len(found) < count:
            thing = self.things(2)[1]
            if thing not in avoid and thing not in self.seen:
                self.place(thing, spots[len(found)])
                found.append(thing)
        return found

    def question(self, task: str, text: str, right: str, wrong: Sequence[str], frames: Sequence[int]) -> Question:
        """Return a question with its options shuffled."""
        options = [right, *wrong]
        self.rng.shuffle(options)
        return Question(task, text, tuple(options), options.index(right), tuple(frames))


def move(track: np.ndarray[Any, Any], step: tuple[float, float], span: tuple[int, int], distance: float) -> None:
    """Let a track travel `distance` pixels along `step` during `span`, and stay where it arrives."""
    frames = np.arange(len(track))
    done = np.clip((frames - span[0]) / max(span[1] - 1 - span[0], 1), 0.0, 1.0) * distance
    track[:, _X] += done * step[0]
    track[:, _Y] += done * step[1]


def recolour(track: np.ndarray[Any, Any], colour: int, start: int) -> None:
    """Give a track another colour from frame `start` on."""
    track[start:, _RGB] = COLOURS[COLOUR_NAMES[colour]]


def resize(track: np.ndarray[Any, Any], factor: float, span: tuple[int, int]) -> None:
    """Let a track grow or shrink to `factor` times its radius during `span`, and stay so."""
    frames = np.arange(len(track))
    track[:, _R] *= 1 + (factor - 1) * np.clip((frames - span[0] + 1) / max(span[1] - span[0], 1), 0.0, 1.0)


def hide(track: np.ndarray[Any, Any], span: tuple[int, int]) -> None:
    """Make a track invisible during `span`."""
    track[span[0] : span[1], _ON] = 0.0


def reglyph(track: np.ndarray[Any, Any], glyph: str, start: int) -> None:
    """Show another character from frame `start` on."""
    track[start:, _ATLAS] = CARD + 1 + GLYPHS.index(glyph)


def luminance(rgb: Sequence[float]) -> float:
    """Return the brightness of a colour, 0 to 255 (Rec. 601)."""
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
