"""What is compared, and on which questions. Wrong words and numbers are refused here, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wqlab import registry
from wqlab.errors import ParameterError, UnknownNameError
from wqlab.evals import pocketbench
from wqlab.hf import QuantizedKVCache
from wqlab.types import Granularity

FULL = "fp16"


@dataclass(frozen=True)
class Setting:
    """A method at one width, for the visual tokens.

    Parameters
    ----------
    method : str
        ``"fp16"``, which encodes nothing, or a registered quantizer of KV caches.
    num_bits : int, optional
        Bits per code; every quantizer needs it.
    granularity : {"window_channel", "window_head", "window"}
        Which elements of a window share scale and minimum.
    window_size : int
        Tokens per window, counted from the first visual token.
    sink_windows : int
        First visual windows that stay in full precision.

    Raises
    ------
    UnknownNameError
        For a method that does not exist.
    ParameterError
        For a setting that the method cannot serve.
    """

    method: str = FULL
    num_bits: int | None = None
    granularity: Granularity = "window_channel"
    window_size: int = 32
    sink_windows: int = 0

    def __post_init__(self) -> None:
        if self.method == FULL:
            if self.num_bits not in (None, 16):
                raise ParameterError(f"method {FULL} holds 16 bits per number, not num_bits = {self.num_bits}; name a quantizer")
            return
        try:
            supported = registry.lookup("method", self.method).supported_bits
        except UnknownNameError as error:
            raise UnknownNameError("method", self.method, [FULL, *error.known]) from error
        if self.num_bits is None:
            raise ParameterError(f"method {self.method} needs num_bits: one of {', '.join(map(str, supported))}")
        self.cache(0, 0)  # refuses now what it would refuse later

    @property
    def label(self) -> str:
        """A short name, different for every setting, for example ``"rtn int2 window_channel 32"``."""
        if self.method == FULL:
            return FULL
        sinks = f" sinks {self.sink_windows}" if self.sink_windows else ""
        return f"{self.method} int{self.num_bits} {self.granularity} {self.window_size}{sinks}"

    def cache(self, start: int, stop: int, storage_dtype: torch.dtype | None = None) -> Any:
        """Return an empty `QuantizedKVCache` that encodes visual tokens in ``[start, stop)`` and holds the rest as it is."""
        if self.method == FULL or self.num_bits is None:
            return QuantizedKVCache(policy="full", storage_dtype=storage_dtype)
        return QuantizedKVCache(
            method=self.method,
            num_bits=self.num_bits,
            policy="span",
            window_size=self.window_size,
            granularity=self.granularity,
            storage_dtype=storage_dtype,
            start=start,
            stop=stop,
            sink_windows=self.sink_windows,
        )


@dataclass(frozen=True)
class Exam:
    """Which questions are asked, and how.

    Parameters
    ----------
    protocol : str
        A registered protocol.
    split : {"easy", "hard"}
        Of PocketBench.
    seed : int
        Stream of videos; those below `pocketbench.FIRST_TEST_SEED` are for development.
    limit : int
        Questions, from the stream's first on.
    num_frames : int
        Frames per video.
    blind : bool
        Replace all visual tokens by zeros: what text alone gives away.

    Raises
    ------
    UnknownNameError
        For another protocol or split.
    ParameterError
        For a number outside its limits.
    """

    protocol: str = "cache_then_ask"
    split: str = "easy"
    seed: int = 0
    limit: int = 100
    num_frames: int = 32
    blind: bool = False

    def __post_init__(self) -> None:
        registry.lookup("protocol", self.protocol)
        if self.limit < 1:
            raise ParameterError(f"limit = {self.limit} is no number of questions; ask 1 or more")
        next(pocketbench.items(self.split, self.seed, self.num_frames))  # refuses now what it would refuse later
