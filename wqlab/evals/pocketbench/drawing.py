"""From drawing orders to frames, in torch, on any device: background, weather, sprites, noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wqlab.evals.pocketbench import atlas, backgrounds
from wqlab.evals.pocketbench.scene import SIZE, Scene

#: Weather as words.SCENES: factor and offset per channel; snow and rain add a texture.
_FACTOR = (
    (1, 1, 1),
    (0.22, 0.24, 0.38),
    (0.35, 0.35, 0.35),
    (0.75, 0.78, 0.82),
    (0.55, 0.58, 0.62),
    (1.05, 0.72, 0.42),
    (0.35, 0.75, 0.85),
)
_OFFSET = ((0, 0, 0), (0, 0, 18), (135, 135, 140), (25, 25, 30), (10, 12, 16), (30, 10, 0), (0, 25, 35))
_SNOW, _RAIN = 3, 4
_TEXTURES = 8
#: Contrast of photographs, so that objects stand out; noise in units of 255.
_CONTRAST, _NOISE = 0.65, 4.0
_MIDDLE = 118
#: Outlines of bright and of dark sprites, and the brightness between them.
_DARK_LINE, _LIGHT_LINE, _BRIGHT = 20.0, 235.0, 110.0
_CHUNK = 256  # frames at a time


class Canvas:
    """Draws scenes on one device; keeps bank, masks and textures there.

    Parameters
    ----------
    device : torch.device or str
        Where to draw. CPU and GPU agree up to rounding.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.bank = backgrounds.bank().to(self.device)
        self.masks = atlas.masks().to(self.device)
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(_TEXTURES, 1, SIZE, SIZE, generator=generator).to(self.device) * _NOISE
        dots = (torch.rand(_TEXTURES, 1, SIZE, SIZE, generator=generator) > 0.996).float()
        self.snow = F.max_pool2d(dots, 5, 1, 2).to(self.device)
        streaks = (torch.rand(_TEXTURES, 1, SIZE, SIZE, generator=generator) > 0.997).float()
        # A streak: a dot carried down and a little to the left.
        self.rain = torch.stack([streaks.roll((i, -i // 4), (2, 3)) for i in range(14)]).amax(0).to(self.device)
        self.factor = torch.tensor(_FACTOR, device=self.device)
        self.luminance = torch.tensor([0.299, 0.587, 0.114], device=self.device)
        self.offset = torch.tensor(_OFFSET, device=self.device, dtype=torch.float32)

    def draw(self, scenes: Sequence[Scene]) -> Tensor:
        """Return uint8 [videos, frames, 3, SIZE, SIZE]; all scenes have as many frames."""
        at_once = max(1, _CHUNK // len(scenes[0].backgrounds))
        return torch.cat([self.frames(orders(scenes[i : i + at_once])) for i in range(0, len(scenes), at_once)])

    def frames(self, orders: Orders) -> Tensor:
        """Draw orders in one piece: uint8 [videos, frames, 3, SIZE, SIZE]."""
        videos, length = orders.pictures.shape
        moved = orders.to(self.device)
        crops = moved.crops.repeat_interleave(length, 0)
        # By the video alone, so that a video looks the same in every batch.
        texture = ((torch.arange(length, device=self.device) + moved.crops[:, :1]) % _TEXTURES).flatten()
        steps = torch.arange(SIZE, device=self.device)
        columns = torch.where(crops[:, 2:] == 1, SIZE - 1 - steps, steps) + crops[:, :1]
        rows = steps + crops[:, 1:2]
        pictures = moved.pictures.flatten()[:, None, None]
        frames = self.bank[pictures, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float()
        frames = (frames - _MIDDLE) * _CONTRAST + _MIDDLE
        frames = self._weather(frames, moved.weather.flatten(), moved.strength.repeat_interleave(length), texture)
        # A border on each side lets a sprite lie partly outside.
        canvas = F.pad(frames, (orders.reach,) * 4)
        for sprites, where in zip(torch.split(moved.sprites, orders.layers), torch.split(moved.where, orders.layers), strict=True):
            self._blend(canvas, sprites, where, orders.reach)
        inside = slice(orders.reach, orders.reach + SIZE)
        frames = canvas[:, :, inside, inside] + self.noise[texture]
        return frames.round().clamp_(0, 255).to(torch.uint8).view(videos, length, 3, SIZE, SIZE)

    def _weather(self, frames: Tensor, weather: Tensor, strength: Tensor, texture: Tensor) -> Tensor:
        by = strength[:, None, None, None]
        changed = frames * self.factor[weather][:, :, None, None] + self.offset[weather][:, :, None, None]
        # Textures move from frame to frame, because each frame takes the next one.
        for kind, pattern, brightness in ((_SNOW, self.snow, 250.0), (_RAIN, self.rain, 190.0)):
            mask = pattern[texture] * (weather == kind)[:, None, None, None]
            changed = changed + mask * (brightness - changed)
        return frames + by * (changed - frames)

    def _blend(self, canvas: Tensor, s: Tensor, where: Tensor, reach: int) -> None:
        """Blend at most one sprite per frame, [n, FIELDS], into frames `where` [n] of a canvas [frames, 3, ...]."""
        x, y = s[:, 1].clamp(0, SIZE - 1), s[:, 2].clamp(0, SIZE - 1)
        left, top = x.floor().long(), y.floor().long()  # of the patch in the canvas: centre - reach + reach
        pixels = torch.arange(2 * reach, device=self.device)
        # Where each pixel of the patch lies in the mask, -1 to 1.
        u, v = (
            (pixels - reach + 0.5 - (centre - corner)[:, None]) / (s[:, 3] * atlas.REACH)[:, None]
            for centre, corner in ((x, left), (y, top))
        )
        grid = torch.stack([u[:, None, :].expand(-1, 2 * reach, -1), v[:, :, None].expand(-1, -1, 2 * reach)], dim=-1)
        mask = F.grid_sample(self.masks[s[:, 0].long()], grid, padding_mode="zeros", align_corners=False)
        colour = s[:, 4:7, None, None]
        bright = (s[:, 4:7] @ self.luminance > _BRIGHT)[:, None, None, None]
        outline = torch.where(bright, _DARK_LINE, _LIGHT_LINE)
        inside = (mask[:, 1:] / mask[:, :1].clamp_min(1e-3)).clamp(0, 1)
        paint = outline + inside * (colour - outline)
        at = (where[:, None, None], slice(None), (top[:, None] + pixels)[:, :, None], (left[:, None] + pixels)[:, None, :])
        under = canvas[at].permute(0, 3, 1, 2)
        canvas[at] = (under + mask[:, :1] * (paint - under)).permute(0, 2, 3, 1)


class Orders(NamedTuple):
    """Scenes as tensors.

    Parameters
    ----------
    sprites : Tensor
        float32 [n, FIELDS]: every sprite that is visible in a frame, layer by layer.
    where : Tensor
        int64 [n]: its frame, of all videos' frames.
    layers : list of int
        How many there are per layer; a layer has at most one per frame.
    reach : int
        Pixels from the centre of the largest to its edge.
    pictures, weather : Tensor
        int64 [videos, frames].
    crops : Tensor
        int64 [videos, 3].
    strength : Tensor
        float32 [videos].
    """

    sprites: Tensor
    where: Tensor
    layers: list[int]
    reach: int
    pictures: Tensor
    weather: Tensor
    crops: Tensor
    strength: Tensor

    def to(self, device: torch.device) -> Orders:
        """Return the same on `device`; the copies do not wait for the GPU."""
        moved = {name: part.to(device, non_blocking=True) for name, part in self._asdict().items() if isinstance(part, Tensor)}
        return self._replace(**moved)  # type: ignore[arg-type]


def orders(scenes: Sequence[Scene]) -> Orders:
    """Return a batch of scenes, all with as many frames, as tensors on the CPU."""
    length = len(scenes[0].backgrounds)
    sprites, layer, where = [], [], []
    for i, scene in enumerate(scenes):
        visible = scene.sprites[:, :, -1] > 0  # [sprites, frames]
        which, frame = visible.nonzero()
        sprites.append(scene.sprites[which, frame])
        layer.append(np.cumsum(visible, axis=0)[which, frame] - 1)  # the nth of its frame lies in layer n
        where.append(frame + i * length)
    layers = np.concatenate(layer)
    order = np.argsort(layers, kind="stable")
    found = np.concatenate(sprites)[order]
    return Orders(
        sprites=torch.from_numpy(found),
        where=torch.from_numpy(np.concatenate(where)[order]),
        layers=np.bincount(layers).tolist() or [0],
        reach=math.ceil(float(found[:, 3].max(initial=1.0)) * atlas.REACH) + 1,
        pictures=torch.from_numpy(np.stack([scene.backgrounds for scene in scenes])),
        weather=torch.from_numpy(np.stack([scene.weather for scene in scenes])),
        crops=torch.tensor([scene.crop for scene in scenes]),
        strength=torch.tensor([scene.strength for scene in scenes], dtype=torch.float32),
    )
