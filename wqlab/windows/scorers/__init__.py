"""Scorers: one score per window, from the text and the visual embeddings. One file each; the registry's kind ``"scorer"``.

A new one is a file with a class that derives from `Scorer` and compares; batches, window units, ragged rows and checks are here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from wqlab import registry
from wqlab.errors import ParameterError
from wqlab.windows.batch import Rows, WindowBatch, WindowScores, WindowUnit, window_batch


@dataclass(frozen=True)
class Scorer(ABC):
    """Base of all scorers. A frozen dataclass: its fields are its options.

    Attributes
    ----------
    reads : {"embeddings", "attention"}
        What `text` and `visual` of `score` are: embeddings, or the attention that `wqlab.hf.question_attention` returns.
        A scorer that reads attention has a field ``layers``, ascending.
    """

    name: ClassVar[str]
    reads: ClassVar[Literal["embeddings", "attention"]] = "embeddings"

    @abstractmethod
    def compare(self, batch: WindowBatch) -> Tensor:
        """Return [batch, windows]: a score for each window, larger for what should keep more bits.

        Must not wait for the device. What it returns for windows that a row does not have is dropped. NaN says that the embeddings
        were not finite.
        """

    def score(
        self,
        text: Rows,
        visual: Rows,
        *,
        window_size: int = 32,
        window_unit: WindowUnit = "tokens",
        tokens_per_frame: int | None = None,
        text_lengths: Sequence[int] | None = None,
        visual_lengths: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        check: bool = True,
    ) -> WindowScores:
        """Return one score per window.

        Parameters
        ----------
        text : Tensor or list of Tensor
            Embeddings of the prompt, of the question alone or of the whole text: which rows, the caller chooses.
        visual : Tensor or list of Tensor
            Visual embeddings after the projector, in the order of the cache.
        window_size, window_unit, tokens_per_frame, text_lengths, visual_lengths, dtype
            See `wqlab.windows.batch.window_batch`.
        check : bool
            True (the default) refuses NaN and infinity at once, and so waits for the device. False never waits: such windows
            stay NaN, and the plan refuses them when it is fetched.

        Returns
        -------
        WindowScores
            ``values`` [batch, windows].

        Raises
        ------
        ParameterError
            See `wqlab.windows.batch.window_batch`.
        NonFiniteError
            For NaN or infinity in the embeddings, with `check`.
        """
        with torch.no_grad():
            batch = window_batch(
                text, visual, window_size=window_size, window_unit=window_unit, tokens_per_frame=tokens_per_frame,
                text_lengths=text_lengths, visual_lengths=visual_lengths, dtype=dtype,
            )  # fmt: skip
            # Inside a caller's autocast region the products would be rounded to half precision.
            device = batch.windows.device.type
            with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
                return batch.scores(self.compare(batch), self.name, check)


def create(scorer: str, **options: Any) -> Scorer:
    """Return the scorer registered as `scorer` with `options`.

    Raises
    ------
    UnknownNameError
        For a scorer that does not exist.
    ParameterError
        For an option it does not have, or a value outside its limits.
    """
    found: type[Scorer] = registry.lookup("scorer", scorer)
    known = list(found.__dataclass_fields__)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ParameterError(f"scorer {scorer} has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}")
    return found(**options)
