"""What is measured of a model once, before any question is asked: ranges of channels and the layers' importance."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wqlab.evals import pocketbench
from wqlab.hf.calibration import calibrate
from wqlab.hf.capture import capture_importance
from wqlab.hf.kv_codebooks import learn_codebooks
from wqlab.models.pocket import prompt
from wqlab.quantizers.calibration import Calibration
from wqlab.quantizers.codebooks import KVCodebooks, Rotary

#: Stream and number of the videos that models are calibrated on: of development, like everything that may be tuned.
SEED, VIDEOS = 0, 4


class _Measured(NamedTuple):
    calibration: Calibration
    importance: list[float]


class ModelFacts:
    """Facts about a model on videos like those of the exam, measured when they are first asked for.

    Parameters
    ----------
    loaded : object
        With ``model`` and ``tokenizer``.
    split : str
        Of PocketBench.
    num_frames : int
        Frames per video.
    """

    def __init__(self, loaded: Any, split: str, num_frames: int) -> None:
        self._loaded, self._split, self._num_frames = loaded, split, num_frames
        self._codebooks: dict[tuple[int, Rotary], KVCodebooks] = {}

    @property
    def calibration(self) -> Calibration:
        """Ranges of every channel."""
        return self._measured.calibration

    @property
    def importance(self) -> list[float]:
        """s_i of every layer (WindowQuant, Eq. 9, after the residual add)."""
        return self._measured.importance

    def codebooks(self, num_bits: int, rotary: Rotary) -> KVCodebooks:
        """Return CQ's codebooks, learnt once from those videos with their questions (all tokens alike)."""
        if (num_bits, rotary) not in self._codebooks:
            self._codebooks[num_bits, rotary] = learn_codebooks(self._loaded.model, num_bits, rotary, inputs_embeds=self.embeddings)
        return self._codebooks[num_bits, rotary]

    @cached_property
    def _measured(self) -> _Measured:
        with torch.inference_mode(), capture_importance(self._loaded.model) as meters:
            calibration = calibrate(self._loaded.model, inputs_embeds=self.embeddings)
        return _Measured(calibration, [meter.after_residual.value() for meter in meters])

    @cached_property
    def embeddings(self) -> Tensor:
        """The first videos of the development stream and their questions, cut to the shortest: [videos, seq, hidden]."""
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        embed = model.get_input_embeddings()
        weight = embed.weight
        items = list(pocketbench.items(self._split, SEED, self._num_frames, stop=VIDEOS))
        asked = [prompt.question_ids(tokenizer, item.questions[0].text, item.questions[0].options) for item in items]
        shortest = min(map(len, asked))
        with torch.inference_mode():
            video = model.get_video_features(pocketbench.draw(items, weight.device)).to(weight.dtype)
            opening = torch.tensor([prompt.prefix_ids(tokenizer)] * len(items), device=weight.device)
            question = torch.tensor([ids[:shortest] for ids in asked], device=weight.device)
            return torch.cat([embed(opening), video, embed(question)], dim=1)
