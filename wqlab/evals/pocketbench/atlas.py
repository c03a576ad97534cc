"""Masks of all shapes, the card and the characters, drawn once."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wqlab.evals.pocketbench.words import GLYPHS, SHAPES

#: Pixels of a side of a mask; a shape of radius 1 fills the middle, up to the margin.
SIDE = 64
#: How far the mask reaches, in radii: the outline lies between 1 and this.
REACH = 1.25
#: The outline's width, in radii.
_OUTLINE = 0.14
_FINE = 4  # drawn this much larger, then reduced


@lru_cache(maxsize=1)
def masks() -> Tensor:
    """Return the atlas: float32 [shapes + card + characters, 2, SIDE, SIDE], 0 to 1.

    Channel 0 is what covers the picture, outline included; channel 1 is the part of it that has the sprite's own colour.
    """
    from PIL import ImageChops, ImageFilter

    drawn = []
    grow = 2 * round(_OUTLINE * SIDE * _FINE / (2 * REACH)) + 1
    for name in (*SHAPES, "card"):
        fill = _shape(name)
        drawn.append((fill.filter(ImageFilter.MaxFilter(grow)), fill))
    for glyph in GLYPHS:
        mask = _glyph(glyph)
        drawn.append((mask, ImageChops.constant(mask, 255)))
    return torch.stack([torch.stack([_reduced(part) for part in pair]) for pair in drawn])


def _reduced(image: Any) -> Tensor:
    from PIL import Image

    small = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIDE, SIDE).float() / 255


def _canvas() -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("L", (SIDE * _FINE, SIDE * _FINE), 0)
    return image, ImageDraw.Draw(image)


def _pixels(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    half = SIDE * _FINE / 2
    return [(half + x * half / REACH, half + y * half / REACH) for x, y in points]


def _shape(name: str) -> Any:
    """Return a mask of one shape inside the unit circle, y down."""
    image, pen = _canvas()

    def polygon(points: list[tuple[float, float]], fill: int = 255) -> None:
        pen.polygon(_pixels(points), fill=fill)

    def disc(radius: float, x: float = 0.0, y: float = 0.0, fill: int = 255) -> None:
        pen.ellipse([c for p in _pixels([(x - radius, y - radius), (x + radius, y + radius)]) for c in p], fill=fill)

    def regular(corners: int, radius: float = 1.0, inner: float | None = None) -> list[tuple[float, float]]:
        steps = corners * (1 if inner is None else 2)
        radii = [radius if inner is None or i % 2 == 0 else inner for i in range(steps)]
        return [(r * math.sin(2 * math.pi * i / steps), -r * math.cos(2 * math.pi * i / steps)) for i, r in enumerate(radii)]

    if name == "circle":
        disc(1.0)
    elif name == "square":
        polygon([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)])
    elif name == "triangle":
        polygon([(0, -1), (0.95, 0.8), (-0.95, 0.8)])
    elif name == "diamond":
        polygon([(0, -1), (0.75, 0), (0, 1), (-0.75, 0)])
    elif name == "cross":
        polygon([(-0.32, -1), (0.32, -1), (0.32, 1), (-0.32, 1)])
        polygon([(-1, -0.32), (1, -0.32), (1, 0.32), (-1, 0.32)])
    elif name == "ring":
        disc(1.0)
        disc(0.5, fill=0)
    elif name == "star":
        polygon(regular(5, 1.05, 0.42))
    elif name == "heart":
        disc(0.52, -0.46, -0.35)
        disc(0.52, 0.46, -0.35)
        polygon([(-0.93, -0.12), (0.93, -0.12), (0, 1)])
    elif name == "moon":
        disc(1.0)
        disc(0.85, 0.5, -0.15, fill=0)
    elif name == "arrow":
        polygon([(-1, -0.3), (0.1, -0.3), (0.1, -0.85), (1, 0), (0.1, 0.85), (0.1, 0.3), (-1, 0.3)])
    elif name == "hexagon":
        polygon(regular(6))
    elif name == "drop":
        disc(0.62, 0, 0.36)
        polygon([(0, -1.05), (0.55, 0.1), (-0.55, 0.1)])
    elif name == "card":
        pen.rounded_rectangle([c for p in _pixels([(-1, -0.9), (1, 0.9)]) for c in p], radius=0.15 * SIDE * _FINE / REACH, fill=255)
    else:
        raise ValueError(f"no drawing for shape {name!r}")
    return image


@lru_cache(maxsize=1)
def _font() -> Any:
    import matplotlib
    from PIL import ImageFont

    # matplotlib ships DejaVu, so every machine draws the same characters.
    path = matplotlib.get_data_path() + "/fonts/ttf/DejaVuSans-Bold.ttf"
    return ImageFont.truetype(path, size=round(2.3 * SIDE * _FINE / (2 * REACH)))


def _glyph(glyph: str) -> Any:
    image, pen = _canvas()
    centre = SIDE * _FINE / 2
    pen.text((centre, centre), glyph, fill=255, font=_font(), anchor="mm")
    return image
