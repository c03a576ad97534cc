"""From drawing orders to frames, in torch, on any device: background, weather, sprites, noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        self.offset = torch.tensor(_OFFSET, device=self.device, dtype=torch.float32)

    def draw(self, scenes: Sequence[Scene]) -> Tensor:
        """Return uint8 [videos, frames, 3, SIZE, SIZE]; all scenes have as many frames."""
        sprites, pictures, crops, weather, strength = (part.to(self.device) for part in tensors(scenes))
        videos, frames = pictures.shape
        per_frame = (
            sprites.transpose(1, 2).flatten(0, 1), pictures.flatten(), crops.repeat_interleave(frames, 0), weather.flatten(),
            strength.repeat_interleave(frames), torch.arange(videos * frames, device=self.device) % _TEXTURES,
        )  # fmt: skip
        drawn = [self._frames(*(part[i : i + _CHUNK] for part in per_frame)) for i in range(0, videos * frames, _CHUNK)]
        return torch.cat(drawn).view(videos, frames, 3, SIZE, SIZE)

    def _frames(
        self, sprites: Tensor, pictures: Tensor, crops: Tensor, weather: Tensor, strength: Tensor, texture: Tensor
    ) -> Tensor:
        """Draw frames [n]: sprites [n, sprites, FIELDS], the rest [n] (crops [n, 3])."""
        steps = torch.arange(SIZE, device=self.device)
        columns = torch.where(crops[:, 2:] == 1, SIZE - 1 - steps, steps) + crops[:, :1]
        rows = steps + crops[:, 1:2]
        frames = self.bank[pictures[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float()
        frames = (frames - 118) * _CONTRAST + 118
        frames = self._weather(frames, weather, strength, texture)
        # A border on each side lets a sprite lie partly outside.
        reach = math.ceil(float(sprites[..., 3].max()) * atlas.REACH) + 1 if sprites.numel() else 1
        canvas = F.pad(frames, (reach,) * 4)
        for k in range(sprites.shape[1]):
            self._sprite(canvas, sprites[:, k], reach)
        frames = canvas[:, :, reach : reach + SIZE, reach : reach + SIZE] + self.noise[texture]
        return frames.round().clamp_(0, 255).to(torch.uint8)

    def _weather(self, frames: Tensor, weather: Tensor, strength: Tensor, texture: Tensor) -> Tensor:
        by = strength[:, None, None, None]
        changed = frames * self.factor[weather][:, :, None, None] + self.offset[weather][:, :, None, None]
        # Textures move from frame to frame, because each frame takes the next one.
        for kind, pattern, brightness in ((_SNOW, self.snow, 250.0), (_RAIN, self.rain, 190.0)):
            mask = pattern[texture] * (weather == kind)[:, None, None, None]
            changed = changed + mask * (brightness - changed)
        return frames + by * (changed - frames)

    def _sprite(self, canvas: Tensor, sprite: Tensor, reach: int) -> None:
        """Blend one sprite [n, FIELDS] into frames [n, 3, SIZE + 2 reach, ...] where it is visible."""
        shown = (sprite[:, 7] > 0).nonzero().squeeze(1)
        if not len(shown):
            return
        s = sprite[shown]
        x, y = s[:, 1].clamp(0, SIZE - 1), s[:, 2].clamp(0, SIZE - 1)
        left, top = x.floor().long(), y.floor().long()  # of the patch in the padded canvas: centre - reach + reach
        steps = torch.arange(2 * reach, device=self.device, dtype=torch.float32) - reach
        # Where each patch pixel lies in the mask, -1 to 1.
        u = (steps + 0.5 - (x - left)[:, None]) / (s[:, 3] * atlas.REACH)[:, None]
        v = (steps + 0.5 - (y - top)[:, None]) / (s[:, 3] * atlas.REACH)[:, None]
        grid = torch.stack([u[:, None, :].expand(-1, len(steps), -1), v[:, :, None].expand(-1, -1, len(steps))], dim=-1)
        mask = F.grid_sample(self.masks[s[:, 0].long()], grid, padding_mode="zeros", align_corners=False)
        colour = s[:, 4:7]
        bright = (colour @ colour.new_tensor([0.299, 0.587, 0.114]) > 110)[:, None].float()
        outline = 235.0 * (1 - bright) + 20.0 * bright
        inside = (mask[:, 1] / mask[:, 0].clamp_min(1e-3)).clamp(0, 1)[:, None]
        paint = inside * colour[:, :, None, None] + (1 - inside) * outline[:, :, None, None]
        rows = (top[:, None] + torch.arange(2 * reach, device=self.device))[:, :, None]
        columns = (left[:, None] + torch.arange(2 * reach, device=self.device))[:, None, :]
        at = (shown[:, None, None], slice(None), rows, columns)
        under = canvas[at].permute(0, 3, 1, 2)
        canvas[at] = (under + mask[:, :1] * (paint - under)).permute(0, 2, 3, 1)


def tensors(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a batch of scenes as tensors: sprites [videos, sprites, frames, FIELDS] (missing ones invisible), pictures and weather
    [videos, frames], crops [videos, 3], strength [videos]."""
    most = max(scene.sprites.shape[0] for scene in scenes)
    sprites = torch.zeros(len(scenes), most, *scenes[0].sprites.shape[1:])
    for i, scene in enumerate(scenes):
        sprites[i, : len(scene.sprites)] = torch.from_numpy(scene.sprites)
    return (
        sprites,
        torch.stack([torch.from_numpy(scene.backgrounds) for scene in scenes]),
        torch.tensor([scene.crop for scene in scenes]),
        torch.stack([torch.from_numpy(scene.weather) for scene in scenes]),
        torch.tensor([scene.strength for scene in scenes], dtype=torch.float32),
    )
