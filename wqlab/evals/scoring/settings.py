"""What is compared, and on which questions. Wrong words and numbers are refused here, before anything is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from wqlab import registry
from wqlab.errors import ParameterError, UnknownNameError
from wqlab.evals import pocketbench
from wqlab.hf import QuantizedKVCache, watch_rotary
from wqlab.quantizers.codebooks import Rotary
from wqlab.types import Granularity, QuantSpec

if TYPE_CHECKING:
    from wqlab.evals.scoring.batch import VideoBatch

FULL = "fp16"


class CacheSetting(ABC):
    """One way to hold a cache. Subclasses are frozen dataclasses, one file each; their fields decide the answers."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name, different for every setting."""

    @property
    def encodes_text(self) -> bool:
        """Whether text around the video is encoded too. Then bytes count all tokens held, else those of the video."""
        return False

    @abstractmethod
    def cache(self, batch: VideoBatch) -> Any:
        """Return an empty transformers cache for these videos, which can ``report()`` the bytes that it holds."""


@dataclass(frozen=True)
class Setting(CacheSetting):
    """A method at one width.

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
    policy : {"span", "published"}
        ``span``: every whole window of the video is encoded and text is not, the same ground for all methods. ``published``: the
        method's own policy with its paper's defaults (residual window, sinks), over all tokens.
    rotary : {"before", "after"}
        For methods with codebooks: whether keys are coded as they are before the rotary positions or behind them.

    Raises
    ------
    UnknownNameError
        For a method that does not exist.
    ParameterError
        For a setting that the method cannot serve.

    Notes
    -----
    Methods that were published with a calibration, or that need codebooks, get them from the videos that
    `wqlab.evals.scoring.facts` names.
    """

    method: str = FULL
    num_bits: int | None = None
    granularity: Granularity = "window_channel"
    window_size: int = 32
    sink_windows: int = 0
    policy: Literal["span", "published"] = "span"
    rotary: Rotary = "before"

    def __post_init__(self) -> None:
        if self.rotary not in get_args(Rotary):
            raise ParameterError(f"rotary = {self.rotary!r} is refused: it must be {' or '.join(get_args(Rotary))}")
        if self.policy not in ("span", "published"):
            raise ParameterError(f"policy = {self.policy!r} is refused: it must be span or published")
        if self.method == FULL:
            if self.num_bits not in (None, 16):
                raise ParameterError(f"method {FULL} holds 16 bits per number, not num_bits = {self.num_bits}; name a quantizer")
            return
        try:
            found = registry.lookup("method", self.method)
        except UnknownNameError as error:
            raise UnknownNameError("method", self.method, [FULL, *error.known]) from error
        if found.target != "kv":
            raise ParameterError(f"method {self.method} quantizes weights, not a cache; see wqlab bench vq_weights")
        supported = found.supported_bits
        if self.num_bits is None:
            raise ParameterError(f"method {self.method} needs num_bits: one of {', '.join(map(str, supported))}")
        if self.policy == "published" and self.sink_windows:
            raise ParameterError(f"sink_windows = {self.sink_windows} goes with policy span; a published policy has its own")
        # Refuse now what would be refused later.
        if found.takes_codebooks:
            found.check_spec(QuantSpec(self.num_bits, self.window_size, self.granularity))
        else:
            self._make(0, 0, None, {})

    @property
    def label(self) -> str:
        """A short name, for example ``"rtn int2 window_channel 32"``."""
        if self.method == FULL:
            return FULL
        sinks = f" sinks {self.sink_windows}" if self.sink_windows else ""
        policy = "" if self.policy == "span" else f" {self.policy}"
        if registry.lookup("method", self.method).takes_codebooks:
            return f"{self.method} {self.num_bits} bits, keys {self.rotary} RoPE{sinks}{policy}"
        return f"{self.method} int{self.num_bits} {self.granularity} {self.window_size}{sinks}{policy}"

    @property
    def encodes_text(self) -> bool:
        """True for a published policy."""
        return self.method != FULL and self.policy == "published"

    def cache(self, batch: VideoBatch) -> Any:
        """Return an empty `QuantizedKVCache`."""
        known: dict[str, Any] = {}
        rotary = None
        if self.method != FULL and self.num_bits is not None:
            found = registry.lookup("method", self.method)
            if found.takes_calibration:
                known["calibration"] = batch.facts.calibration
            if found.takes_codebooks:
                known["codebooks"] = batch.facts.codebooks(self.num_bits, self.rotary)
                rotary = watch_rotary(batch.model) if self.rotary == "before" else None
        return self._make(batch.start, batch.stop, batch.storage, known, rotary)

    def _make(
        self, start: int, stop: int, storage_dtype: torch.dtype | None, known: dict[str, Any], rotary: Any = None
    ) -> QuantizedKVCache:
        if self.method == FULL or self.num_bits is None:
            return QuantizedKVCache(policy="full", storage_dtype=storage_dtype)
        policy, options = registry.lookup("method", self.method).published_policy, {}
        if self.policy == "span":
            policy, options = "span", {"start": start, "stop": stop, "sink_windows": self.sink_windows}
        return QuantizedKVCache(
            method=self.method,
            num_bits=self.num_bits,
            policy=policy,
            window_size=self.window_size,
            granularity=self.granularity,
            storage_dtype=storage_dtype,
            method_options=known,
            rotary=rotary,
            **options,
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
