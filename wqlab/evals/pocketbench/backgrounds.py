"""The bank of backgrounds: photographs that scikit-image and scikit-learn install, and frames of the fetched clips.

Nothing of it is committed; it is read where it is installed, and kept as one array in the user's cache.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wqlab import paths
from wqlab.models.clips import clip_path

#: Pixels of a side of a picture; a video shows a 256 x 256 part of it.
SIDE = 288
#: Photographs by the side that uses them, evaluation never shows one of training's.
TRAINING = ("astronaut", "brick", "camera", "cat", "coins", "grass", "hubble_deep_field", "moon", "page", "retina", "flower.jpg")
EVALUATION = ("coffee", "gravel", "rocket", "immunohistochemistry", "text", "china.jpg")
#: Training takes a clip's first part, evaluation its last; what lies between separates the two.
CLIPS = ("bikes", "bigbuckbunny", "carphone_pristine")
_FRAMES_PER_CLIP = 12
_PARTS = ((0.0, 0.6), (0.75, 1.0))


def _groups(training: bool) -> list[range]:
    """Return the bank's indices of one side: a range of one for a photograph, of several for a moving background."""
    photographs = len(TRAINING) + len(EVALUATION)
    own = range(len(TRAINING)) if training else range(len(TRAINING), photographs)
    first = photographs + (0 if training else len(CLIPS) * _FRAMES_PER_CLIP)
    moving = [range(first + i * _FRAMES_PER_CLIP, first + (i + 1) * _FRAMES_PER_CLIP) for i in range(len(CLIPS))]
    return [*(range(i, i + 1) for i in own), *moving]


def choose(rng: random.Random, num_frames: int, training: bool) -> np.ndarray[Any, Any]:
    """Return int64 [num_frames]: a photograph, or (two times in five) a clip that plays once; evaluation's never are training's."""
    groups = _groups(training)
    photographs, moving = [g for g in groups if len(g) == 1], [g for g in groups if len(g) > 1]
    group = rng.choice(moving) if rng.random() < 0.4 else rng.choice(photographs)
    return np.array([group[t * len(group) // num_frames] for t in range(num_frames)], dtype=np.int64)


@lru_cache(maxsize=1)
def bank() -> Tensor:
    """Return all pictures, uint8 [pictures, 3, SIDE, SIDE]: read from the cache, or made first.

    Raises
    ------
    FetchError, DamagedFileError, OutputError
        As `wqlab.models.clip_path`.
    """
    key = hashlib.sha256(repr((TRAINING, EVALUATION, CLIPS, _FRAMES_PER_CLIP, _PARTS, SIDE)).encode()).hexdigest()[:12]
    kept = paths.cache_dir() / "pocketbench" / f"backgrounds-{key}.npz"
    if kept.is_file():
        with np.load(kept) as file:
            return torch.from_numpy(file["pictures"])
    pictures = np.stack([_photograph(name) for name in (*TRAINING, *EVALUATION)])
    moving = [_clip_frames(clip_path(clip), part) for part in _PARTS for clip in CLIPS]
    pictures = np.concatenate([pictures, *moving])
    kept.parent.mkdir(parents=True, exist_ok=True)
    with paths.atomic_path(kept) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, pictures=pictures)
    return torch.from_numpy(pictures)


def _photograph(name: str) -> np.ndarray[Any, Any]:
    if name.endswith(".jpg"):
        from sklearn.datasets import load_sample_image

        return _square(load_sample_image(name))
    from skimage import data

    return _square(getattr(data, name)())


def _clip_frames(path: Path, part: tuple[float, float]) -> np.ndarray[Any, Any]:
    """Return `_FRAMES_PER_CLIP` frames, evenly from a part of a clip."""
    import av

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    chosen = np.linspace(part[0], part[1], _FRAMES_PER_CLIP) * (len(frames) - 1)
    return np.stack([_square(frames[int(i)]) for i in chosen])


def _square(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the middle square of a picture, uint8 [3, SIDE, SIDE]."""
    from PIL import Image, ImageOps

    image = Image.fromarray(picture).convert("RGB")
    return np.array(ImageOps.fit(image, (SIDE, SIDE), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
