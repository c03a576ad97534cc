"""Energy of device work, by NVML: its energy counter, or its power samples where there is no counter, around any callable.

The counter ticks some tens of times a second. Between the first and the last tick that were seen, energy over time is the mean
power; what the work took before and after them is taken at that power.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from wqlab.errors import MissingPartError, ParameterError

_T = TypeVar("_T")
#: Seconds between two looks at the counter, less than between its ticks.
_INTERVAL_S = 0.005
#: Ticks, first and last included, that a mean power needs.
MIN_TICKS = 4
_UNAVAILABLE = "unavailable: "


@dataclass(frozen=True)
class Energy:
    """What work took. Numbers that are not known are NaN, never 0.

    Parameters
    ----------
    seconds : float
        That the work ran.
    joules : float
        Of the whole GPU with its memory.
    watts : float
        Mean power.
    sampled_watts : float
        Mean of the power samples, beside `watts` from the counter; some drivers average them over a second.
    sm_clock_mhz : float
        Mean clock of the multiprocessors.
    ticks : int
        Of the counter, or samples of power, that `watts` is from.
    source : str
        ``NVML energy counter``, ``NVML power samples``, or ``unavailable: `` with the reason.
    """

    seconds: float
    joules: float = math.nan
    watts: float = math.nan
    sampled_watts: float = math.nan
    sm_clock_mhz: float = math.nan
    ticks: int = 0
    source: str = _UNAVAILABLE + "nothing was measured"

    @property
    def available(self) -> bool:
        """Whether there is a number."""
        return not self.source.startswith(_UNAVAILABLE)

    def per(self, count: float) -> float:
        """Return the joules of one of `count` equal parts, such as tokens; NaN where they are not known.

        Raises
        ------
        ParameterError
            For a count that is not positive.
        """
        if not count > 0:
            raise ParameterError(f"count = {count}: energy is shared among 1 or more; count the tokens or calls of the work")
        return self.joules / count


@dataclass
class _Samples:
    """What the thread saw: seconds and millijoules of the counter, watts, MHz; and why it was told less, where it was."""

    counter: list[tuple[float, int]] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    refused: str = ""


class Meter:
    """One GPU, as NVML sees it.

    Parameters
    ----------
    uuid : str
        NVML's name of the GPU, ``GPU-...``; its indices ignore ``CUDA_VISIBLE_DEVICES``.

    Raises
    ------
    MissingPartError
        Without the package, the library, the GPU, or the permission, and where MIG is on; says which.
    """

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise MissingPartError(f"power needs the package nvidia-ml-py ({error}); pip install 'wqlab[gpu]'") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise MissingPartError(f"NVML does not open {uuid}: {_words(error)}") from error
        if self._ask(lambda: pynvml.nvmlDeviceGetMigMode(self._gpu)[0]) == pynvml.NVML_DEVICE_MIG_ENABLE:
            raise MissingPartError("MIG is on, and NVML's counters are those of the whole GPU; measure on one without MIG")
        self._why = ""
        self.has_counter = self._counter() is not None
        no_counter = self._why
        self.has_power = self._power() is not None
        if not (self.has_counter or self.has_power):
            raise MissingPartError(f"NVML tells neither energy ({no_counter}) nor power ({self._why})")

    def measure(self, work: Callable[[], _T]) -> tuple[_T, Energy]:
        """Run `work` once while a thread watches, and return its result and energy.

        Parameters
        ----------
        work : callable
            Must keep the device equally busy for a second or more, and wait for it at the end.
        """
        samples, stop = _Samples(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(samples, stop), daemon=True)
        watch.start()
        start = time.perf_counter()
        try:
            result = work()
        finally:
            end = time.perf_counter()
            stop.set()
            watch.join()
        return result, self._energy(samples, start, end)

    def _watch(self, samples: _Samples, stop: threading.Event) -> None:
        while not stop.is_set():
            if self.has_counter:
                if (millijoules := self._counter()) is not None:
                    samples.counter.append((time.perf_counter(), millijoules))
                else:
                    samples.refused = self._why
            if self.has_power:
                if (watts := self._power()) is not None:
                    samples.watts.append(watts)
                elif not self.has_counter:
                    samples.refused = self._why
            clock = self._ask(lambda: self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM))
            if clock:  # 0 MHz is no clock of a GPU that answers
                samples.clocks.append(float(clock))
            stop.wait(_INTERVAL_S)

    def _energy(self, samples: _Samples, start: float, end: float) -> Energy:
        seconds = end - start
        sampled = sum(samples.watts) / len(samples.watts) if samples.watts else math.nan
        clock = sum(samples.clocks) / len(samples.clocks) if samples.clocks else math.nan
        if self.has_counter:
            seen = [(at, value) for at, value in samples.counter if start <= at <= end]
            # The counter's value is new where it differs from the one seen before.
            ticks = [now for before, now in itertools.pairwise(seen) if now[1] != before[1]]
            if len(ticks) >= MIN_TICKS:
                watts = (ticks[-1][1] - ticks[0][1]) / 1e3 / (ticks[-1][0] - ticks[0][0])
                return Energy(seconds, watts * seconds, watts, sampled, clock, len(ticks), "NVML energy counter")
            why = f"the energy counter ticked {len(ticks)} times in {seconds:.2g} s; {_advice(samples)}"
            return Energy(seconds, sampled_watts=sampled, sm_clock_mhz=clock, ticks=len(ticks), source=_UNAVAILABLE + why)
        if len(samples.watts) < MIN_TICKS:
            why = f"{len(samples.watts)} samples of power in {seconds:.2g} s; {_advice(samples)}"
            return Energy(seconds, sm_clock_mhz=clock, ticks=len(samples.watts), source=_UNAVAILABLE + why)
        return Energy(seconds, sampled * seconds, sampled, sampled, clock, len(samples.watts), "NVML power samples")

    def _counter(self) -> int | None:
        """Return millijoules since the driver was loaded."""
        return self._ask(lambda: int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)))

    def _power(self) -> float | None:
        """Return watts: of now where the driver tells it, else its mean."""

        def instant() -> float:
            found = self._nvml.nvmlDeviceGetFieldValues(self._gpu, [self._nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if found.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(found.nvmlReturn)
            return float(found.value.uiVal) / 1e3

        # A GPU that runs takes power: 0 W is what a driver says that cannot tell.
        found = self._ask(instant) or self._ask(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3)
        if found == 0:
            self._why = "it says 0 W"
        return found or None

    def _ask(self, question: Callable[[], _T]) -> _T | None:
        """Return NVML's answer, or None where it refuses or is too old to know the question."""
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError) as error:
            self._why = _words(error)
            return None


def _advice(samples: _Samples) -> str:
    return f"NVML stopped answering: {samples.refused}" if samples.refused else "work for a second or more"


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def meter(device: Any) -> Meter:
    """Return the meter of a torch device.

    Raises
    ------
    MissingPartError
        For a device that is no CUDA device, and as `Meter`.
    """
    import torch

    place = torch.device(device)
    if place.type != "cuda" or not torch.cuda.is_available():
        raise MissingPartError(f"NVML measures NVIDIA GPUs, and the device is {place}")
    return Meter(f"GPU-{torch.cuda.get_device_properties(place).uuid}")


def measured(work: Callable[[], _T], device: Any) -> tuple[_T, Energy]:
    """Run `work` once and return its result and energy; where NVML cannot tell it, that says why and the work has run all the same.

    Parameters
    ----------
    work : callable
        As of `Meter.measure`.
    device : torch.device or str
        Where it works.
    """
    try:
        found = meter(device)
    except MissingPartError as missing:
        start = time.perf_counter()
        result = work()
        return result, Energy(time.perf_counter() - start, source=f"{_UNAVAILABLE}{missing}")
    return found.measure(work)
