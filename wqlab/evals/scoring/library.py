"""transformers' own QuantizedCache as a setting, as its users pick it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wqlab.errors import ParameterError
from wqlab.evals.scoring.batch import VideoBatch
from wqlab.evals.scoring.settings import CacheSetting
from wqlab.hf.transformers_cache import Backend, TransformersQuantizedCache


@dataclass(frozen=True)
class TransformersSetting(CacheSetting):
    """A backend of transformers' QuantizedCache with its defaults: groups of 64, the newest 128 generated tokens as they are.

    Parameters
    ----------
    backend : {"quanto", "hqq", "fp8"}
        Who encodes.
    num_bits : int
        4 or 2 for quanto; 8, 4, 2 and others for hqq; 8 for fp8.

    Raises
    ------
    ParameterError
        For fp8 with another width.

    Notes
    -----
    A backend that is not installed is refused when the first cache is made, with the line that installs it.
    """

    backend: Backend = "quanto"
    num_bits: int = 4

    def __post_init__(self) -> None:
        if self.backend == "fp8" and self.num_bits != 8:
            raise ParameterError(f"transformers fp8 holds 8 bits per number, not num_bits = {self.num_bits}")

    @property
    def label(self) -> str:
        """For example ``"transformers quanto int4"``."""
        return f"transformers {self.backend} int{self.num_bits}"

    @property
    def encodes_text(self) -> bool:
        """True: it encodes all that was read before the question."""
        return True

    def cache(self, batch: VideoBatch) -> Any:
        """Return an empty `TransformersQuantizedCache`."""
        options = {} if self.backend == "fp8" else {"nbits": self.num_bits}
        return TransformersQuantizedCache(batch.model, self.backend, **options)
