"""Energy against a made-up NVML, whose GPU takes a known power, and every way in which NVML can refuse."""

import itertools
import math
import sys
import types

import pytest
import torch

from wqlab.errors import MissingPartError, ParameterError
from wqlab.profile import power
from wqlab.profile.power import Energy, Meter, measured


class NVML(types.ModuleType):
    """Stands for pynvml: a GPU of 300 W whose energy counter ticks every 0.1 s of a clock that each look moves on."""

    NVML_CLOCK_SM, NVML_DEVICE_MIG_ENABLE, NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = 1, 1, 186, 0
    watts = 300.0

    class NVMLError(Exception):
        pass

    def __init__(self, refuses=(), mig=0, says="Not Supported"):
        super().__init__("pynvml")
        self.refuses, self.mig, self.says = refuses, mig, says

    def _answer(self, name, value):
        if name in self.refuses:
            raise self.NVMLError(self.says)
        return value

    def nvmlInit(self):
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._answer("uuid", uuid)

    def nvmlDeviceGetMigMode(self, gpu):
        return self._answer("mig", (self.mig, self.mig))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        return self._answer("energy", int(self.watts * (clock.now_ms // 100 * 100)) + 10**9)

    def nvmlDeviceGetFieldValues(self, gpu, fields):
        value = types.SimpleNamespace(uiVal=int(self.watts * 1e3))
        return [types.SimpleNamespace(nvmlReturn=3 if "instant" in self.refuses else 0, value=value)]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self._answer("power", int(self.watts * 1e3))

    def nvmlDeviceGetClockInfo(self, gpu, which):
        return self._answer("clock", 1980)


class Clock:
    """Stands for the module time, and for threading: nothing waits, and looking is what takes time."""

    now_ms = 0

    def perf_counter(self):
        return self.now_ms / 1e3


clock = Clock()


@pytest.fixture
def nvml(monkeypatch):
    """Puts a made-up NVML in place, and lets the watching thread look every 10 ms of made-up time."""
    clock.now_ms = 0

    def make(**given):
        found = NVML(**given)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        return found

    monkeypatch.setattr(power, "time", clock)
    return make


def work(meter, monkeypatch, milliseconds):
    """Measure work of so long without a thread: it looks every 10 ms itself."""

    class Thread:
        def __init__(self, target, args, daemon):
            self.samples = args[0]

        def start(self):
            pass

        def join(self):
            pass

        def look(self):
            class Once:
                turns = itertools.count()

                def is_set(self):
                    return next(self.turns) > 0

                def wait(self, seconds):
                    pass

            meter._watch(self.samples, Once())

    threads = []

    def thread(**given):
        threads.append(Thread(**given))
        return threads[-1]

    monkeypatch.setattr(power.threading, "Thread", thread)

    def body():
        for _ in range(milliseconds // 10):
            threads[0].look()
            clock.now_ms += 10
        return "done"

    return meter.measure(body)


def test_the_counter_gives_the_mean_power(nvml, monkeypatch):
    nvml()
    result, found = work(Meter("GPU-1"), monkeypatch, 2050)
    assert result == "done"
    assert found.source == "NVML energy counter"
    assert found.available
    assert found.seconds == pytest.approx(2.05)
    assert found.watts == pytest.approx(300)
    assert found.joules == pytest.approx(615)  # also of what lies before the first tick and after the last
    assert found.per(1000) == pytest.approx(0.615)
    assert (found.sampled_watts, found.sm_clock_mhz) == (300, 1980)
    assert found.ticks == 20


def test_work_too_short_for_the_counter_has_no_number(nvml, monkeypatch):
    nvml()
    _, found = work(Meter("GPU-1"), monkeypatch, 200)
    assert not found.available
    assert found.source == "unavailable: the energy counter ticked 1 times in 0.2 s; work for a second or more"
    assert math.isnan(found.joules)
    assert math.isnan(found.per(5))


@pytest.mark.parametrize("refuses", [("energy",), ("energy", "instant")])
def test_without_a_counter_power_is_sampled(nvml, monkeypatch, refuses):
    nvml(refuses=refuses)
    _, found = work(Meter("GPU-1"), monkeypatch, 1000)
    assert found.source == "NVML power samples"
    assert found.joules == pytest.approx(300)


def test_a_clock_that_is_not_told_is_not_a_number(nvml, monkeypatch):
    nvml(refuses=("clock", "mig"))  # GPUs without MIG refuse the question
    _, found = work(Meter("GPU-1"), monkeypatch, 1000)
    assert math.isnan(found.sm_clock_mhz)
    assert found.watts == pytest.approx(300)


@pytest.mark.parametrize("refuses", [(), ("energy",)])
def test_an_nvml_that_stops_answering_is_named(nvml, monkeypatch, refuses):
    found = nvml(refuses=refuses, says="GPU is lost")
    meter = Meter("GPU-1")
    found.refuses = ("energy", "instant", "power", "clock")
    _, energy = work(meter, monkeypatch, 1000)
    assert not energy.available
    assert "0 samples of power" in energy.source if refuses else "ticked 0 times" in energy.source
    assert energy.source.endswith("NVML stopped answering: GPU is lost")
    assert math.isnan(energy.joules)
    assert math.isnan(energy.sm_clock_mhz)
    assert energy.seconds == pytest.approx(1)


def test_zero_watts_and_zero_megahertz_are_no_numbers(nvml, monkeypatch):
    found = nvml(refuses=("energy",))
    found.watts = 0.0
    with pytest.raises(MissingPartError, match=r"energy \(Not Supported\) nor power \(it says 0 W\)"):
        Meter("GPU-1")
    found = nvml()
    monkeypatch.setattr(found, "nvmlDeviceGetClockInfo", lambda gpu, which: 0)
    _, energy = work(Meter("GPU-1"), monkeypatch, 1000)
    assert math.isnan(energy.sm_clock_mhz)
    assert energy.watts == pytest.approx(300)


@pytest.mark.parametrize("kind", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "NO_PERMISSION", "UNINITIALIZED", "GPU_IS_LOST"])
def test_each_error_of_the_real_package_is_named(monkeypatch, kind):
    """Only what the driver would answer is made up."""
    pynvml = pytest.importorskip("pynvml")

    def refuse():
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{kind}"))

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: types.SimpleNamespace(uuid="1"))
    result, found = measured(lambda: 7, "cuda")
    assert (result, found.available) == (7, False)
    told = str(pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{kind}")))
    assert found.source == f"unavailable: NVML does not open GPU-1: {told}"
    assert math.isnan(found.joules)


def test_questions_that_the_real_package_says_are_not_supported(monkeypatch):
    pynvml = pytest.importorskip("pynvml")

    def refuse(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    for name in ("MigMode", "TotalEnergyConsumption", "FieldValues", "PowerUsage"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    with pytest.raises(MissingPartError, match=r"neither energy \(Not Supported\) nor power \(Not Supported\)"):
        Meter("GPU-1")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda gpu: (pynvml.NVML_DEVICE_MIG_ENABLE, 1))
    with pytest.raises(MissingPartError, match="MIG is on"):
        Meter("GPU-1")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"refuses": ("init",), "says": "Driver Not Loaded"}, "NVML does not open GPU-1: Driver Not Loaded"),
        ({"refuses": ("uuid",), "says": "Not Found"}, "NVML does not open GPU-1: Not Found"),
        (
            {"refuses": ("energy", "instant", "power"), "says": "Insufficient Permissions"},
            r"energy \(Insufficient .* power \(Insuff",
        ),
        ({"mig": 1}, "MIG is on"),
    ],
)
def test_what_nvml_refuses_is_named(nvml, given, told):
    nvml(**given)
    with pytest.raises(MissingPartError, match=told):
        Meter("GPU-1")


def test_without_the_package_the_work_runs_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: types.SimpleNamespace(uuid="1"))
    result, found = measured(lambda: 7, "cuda")
    assert result == 7
    assert found.source.startswith("unavailable: power needs the package nvidia-ml-py")
    assert found.seconds > 0
    assert math.isnan(found.watts)


def test_a_cpu_has_no_energy():
    result, found = measured(lambda: 7, "cpu")
    assert (result, found.source) == (7, "unavailable: NVML measures NVIDIA GPUs, and the device is cpu")


def test_work_that_fails_fails(nvml):
    nvml()
    with pytest.raises(ZeroDivisionError):
        Meter("GPU-1").measure(lambda: 1 / 0)


def test_energy_is_not_shared_among_nothing():
    with pytest.raises(ParameterError, match="count = 0"):
        Energy(1.0, 5.0).per(0)


@pytest.mark.gpu
def test_a_busy_gpu_takes_power():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = torch.randn(4096, 4096, device="cuda")

    def busy():
        for _ in range(600):
            x @ x
        torch.cuda.synchronize()

    _, found = measured(busy, "cuda")
    assert found.available or found.source.startswith("unavailable: ")
    assert found.available == (found.watts > 0)
