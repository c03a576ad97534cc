"""What PocketBench can show and say: shapes, colours, characters, scenes, and which combinations training never sees."""

from __future__ import annotations

from typing import NamedTuple

#: The first six are the easy split's.
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring", "star", "heart", "moon", "arrow", "hexagon", "drop")
#: Name -> RGB, 0 to 255. The first eight are the easy split's; the second eight are their near neighbours.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 35, 35),
    "green": (40, 165, 60),
    "blue": (45, 85, 230),
    "yellow": (240, 222, 50),
    "purple": (140, 50, 190),
    "orange": (245, 140, 25),
    "white": (246, 246, 246),
    "black": (14, 14, 14),
    "pink": (250, 155, 185),
    "brown": (125, 75, 35),
    "gray": (130, 130, 130),
    "cyan": (60, 215, 230),
    "lime": (165, 235, 50),
    "teal": (10, 120, 120),
    "navy": (20, 30, 110),
    "magenta": (225, 40, 180),
}
COLOUR_NAMES = tuple(COLOURS)
DIGITS = "0123456789"
#: Without I, O and Q, which fonts draw like digits or like each other.
LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
GLYPHS = DIGITS + LETTERS
#: What lies over the background. `day` is the photograph as it is.
SCENES = ("day", "night", "fog", "snow", "rain", "sunset", "water")
#: Name -> unit step (x to the right, y down). The first four are the easy split's.
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "up left": (-0.71, -0.71),
    "up right": (0.71, -0.71),
    "down left": (-0.71, 0.71),
    "down right": (0.71, 0.71),
}
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")


class Thing(NamedTuple):
    """A coloured shape by its indices."""

    colour: int
    shape: int

    @property
    def name(self) -> str:
        """What questions call it, for example ``red circle``."""
        return f"{COLOUR_NAMES[self.colour]} {SHAPES[self.shape]}"


def is_held_out(thing: Thing) -> bool:
    """Return whether training never shows this combination: one in six; it shows every colour and every shape in others."""
    return (thing.colour * 5 + thing.shape) % 6 == 0


def cell_name(x: float, y: float) -> str:
    """Return the name of the cell of the 8 x 8 grid at pixel (x, y) of 256: column A to H, row 1 to 8, as on a chess board."""
    column, row = (min(max(int(value // 32), 0), 7) for value in (x, y))
    return f"{'ABCDEFGH'[column]}{row + 1}"


def quadrant_name(x: float, y: float) -> str:
    """Return which quarter of the picture pixel (x, y) of 256 lies in."""
    return QUADRANTS[2 * (y >= 128) + (x >= 128)]
