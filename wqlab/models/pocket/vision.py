"""EfficientNet-Lite0 as a frozen video encoder: 64 tokens a frame, each with what three depths of the network see at its place.

The network is that of the TensorFlow "lite" family: inverted bottlenecks (1 x 1 expand, depthwise, 1 x 1 project), ReLU6, no
squeeze-and-excitation. The head (320 -> 1280, pooling, classes) is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Side of the frames, in pixels.
FRAME_SIZE = 256
#: Tokens of one frame: the 8 x 8 places of the stride-32 map.
NUM_PATCHES = 64
#: Features per token of strides 8, 16 and 32: 4 x 4 x 40, 2 x 2 x 112 and 320.
LEVELS = (640, 448, 320)
#: Features per token in all.
NUM_FEATURES = sum(LEVELS)

_STEM = 32
#: Kernel, stride, expansion, output channels, repeats. A map is taken after the stages of `_TAPS`.
_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
_TAPS = (2, 4, 6)
#: Of the checkpoint's BatchNorms; TensorFlow's default for this family, not torch's.
_BATCH_NORM_EPS = 1e-3
#: Our name of a convolution -> the checkpoint's convolution and the BatchNorm behind it.
_BLOCK_NAMES = {"expand": ("_expand_conv", "_bn0"), "depthwise": ("_depthwise_conv", "_bn1"), "project": ("_project_conv", "_bn2")}


class Maps(NamedTuple):
    """What the network sees at three depths, for frames of 256 x 256."""

    stride8: Tensor
    """[N, 40, 32, 32]"""
    stride16: Tensor
    """[N, 112, 16, 16]"""
    stride32: Tensor
    """[N, 320, 8, 8]"""


class _SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding for even inputs: at stride 2, one more zero behind than before."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0, groups=groups)
        before = (kernel - stride) // 2
        self.extra = (before, kernel - stride - before) * 2 if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.extra) if self.extra else x)


class _Block(nn.Module):
    """An inverted bottleneck, its BatchNorms folded into the convolutions."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = nn.Conv2d(inputs, wide, 1) if expansion > 1 else None
        self.depthwise = _SameConv2d(wide, wide, kernel, stride, groups=wide)
        self.project = nn.Conv2d(wide, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        narrow: Tensor = self.project(F.relu6(self.depthwise(wide), inplace=True))
        return narrow + x if self.residual else narrow


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 up to its last bottleneck, for inference.

    Random weights until `load_state_dict(fold_checkpoint(...))`; `load_vision` does both. Fastest on a GPU in float16 and
    `torch.channels_last`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _SameConv2d(3, _STEM, 3, stride=2)
        stages, inputs = [], _STEM
        for kernel, stride, expansion, outputs, repeats in _STAGES:
            blocks = [_Block(inputs, outputs, kernel, stride, expansion)]
            blocks += [_Block(outputs, outputs, kernel, 1, expansion) for _ in range(repeats - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.stages = nn.ModuleList(stages)

    def forward(self, pixels: Tensor) -> Maps:
        """Return the three maps of frames.

        Parameters
        ----------
        pixels : Tensor [N, 3, 256, 256]
            Of `normalise`, in the dtype of the weights.
        """
        x = F.relu6(self.stem(pixels), inplace=True)
        taken = []
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index in _TAPS:
                taken.append(x)
        return Maps(*taken)


def normalise(frames: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``(frames - 127) / 128``, the range that the network was trained on; exact in float16 too.

    Parameters
    ----------
    frames : uint8 Tensor [N, 3, 256, 256]
    dtype : torch.dtype
        Of the result.
    """
    return (frames.to(dtype) - 127) / 128


def patch_features(maps: Maps) -> Tensor:
    """Return the features of each of the 8 x 8 places of a frame, row by row.

    A place of the stride-32 map covers 2 x 2 of the stride-16 map and 4 x 4 of the stride-8 map; their vectors are laid side by
    side (space to depth), so that fine detail keeps its position inside the place.

    Returns
    -------
    Tensor [N, 64, 1408]
        The 640 features of stride 8, the 448 of stride 16, the 320 of stride 32.
    """
    levels = (F.pixel_unshuffle(maps.stride8, 4), F.pixel_unshuffle(maps.stride16, 2), maps.stride32)
    return torch.cat(levels, dim=1).flatten(2).transpose(1, 2)


def fold_checkpoint(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of `EfficientNetLite0` from the published one, each BatchNorm folded into its convolution (float32).

    With ``g = weight / sqrt(running_var + eps)``, the convolution's weight is multiplied by g and its bias is
    ``bias - running_mean * g``.

    Raises
    ------
    KeyError
        When `checkpoint` is of another network.
    """
    state: dict[str, Tensor] = {}

    def fold(target: str, conv: str, norm: str) -> None:
        gain = checkpoint[f"{norm}.weight"].float() / (checkpoint[f"{norm}.running_var"].float() + _BATCH_NORM_EPS).sqrt()
        state[f"{target}.weight"] = checkpoint[f"{conv}.weight"].float() * gain[:, None, None, None]
        state[f"{target}.bias"] = checkpoint[f"{norm}.bias"].float() - checkpoint[f"{norm}.running_mean"].float() * gain

    fold("stem", "_conv_stem", "_bn0")
    number = 0  # the checkpoint counts blocks through, we count them in their stage
    for stage, (_, _, expansion, _, repeats) in enumerate(_STAGES):
        for block in range(repeats):
            for ours, (conv, norm) in _BLOCK_NAMES.items():
                if ours != "expand" or expansion > 1:
                    fold(f"stages.{stage}.{block}.{ours}", f"_blocks.{number}.{conv}", f"_blocks.{number}.{norm}")
            number += 1
    return state


def load_vision() -> EfficientNetLite0:
    """Return the encoder with its ImageNet weights, float32, frozen, in evaluation mode; fetched first when absent.

    Raises
    ------
    FetchError, DamagedFileError, OutputError
        As `wqlab.models.fetch.fetch`.
    """
    # Imported here: the network itself needs nothing of the catalogue.
    from wqlab.models import fetch

    checkpoint = torch.load(fetch.file_of("efficientnet_lite0", ".pth"), map_location="cpu", weights_only=True)
    vision = EfficientNetLite0()
    vision.load_state_dict(fold_checkpoint(checkpoint))
    return vision.eval().requires_grad_(False)
