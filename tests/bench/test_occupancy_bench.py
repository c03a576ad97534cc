"""The kernels' registers, and the bench against a driver that is made up from the simulator."""

import pytest
import torch

from wqlab import bench, codegen
from wqlab.bench import occupancy as occupancy_bench
from wqlab.bench.occupancy import KERNELS, OccupancyBench, source
from wqlab.errors import KernelError, LimitError, MissingPartError
from wqlab.profile import environment
from wqlab.simulate.gpus import gpu
from wqlab.simulate.occupancy import occupancy


@pytest.fixture(scope="module")
def usage():
    return codegen.compile_cubin(source(), arch="sm_90").usage


def test_the_kernels_have_many_register_counts_and_do_not_spill(usage):
    assert len(usage) == len(KERNELS)
    assert not any(found.spills for found in usage.values())
    registers = {found.registers for found in usage.values()}
    assert len(registers) >= 10
    assert min(registers) <= 32
    assert max(registers) > 250
    assert {found.shared_bytes for found in usage.values()} == {0, 1, 1000, 5000}


def test_without_a_gpu_it_is_said(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for quick in (False, True):
        with pytest.raises(MissingPartError, match="CUDA driver"):
            bench.run("occupancy", tmp_path, quick=quick)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def on_an_h200(usage, monkeypatch):
    """Pretends that there is an H200, whose driver tells what `blocks` does."""

    def make(blocks, told="as reported"):
        class Kernel:
            def __init__(self, name):
                self.name = name

            def resident_blocks(self, threads, size, part):
                return blocks(usage[self.name], threads, size, part)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(environment, "gpu_key", lambda: "h200")
        monkeypatch.setattr(occupancy_bench, "limits_told", lambda spec: told)
        monkeypatch.setattr(codegen, "load", lambda compiled, name, device: Kernel(name))
        return OccupancyBench().measure()

    return make


def simulated(used, threads, size, part):
    return occupancy(gpu("h200"), used.registers, threads, size + used.shared_bytes, part).blocks


def test_many_configurations_are_compared(on_an_h200):
    data = on_an_h200(simulated)
    assert list(data.columns) == list(OccupancyBench.columns)
    assert len(data) > 1000
    assert data["equal"].all()
    assert {"registers", "shared memory", "warps", "blocks"} <= {name for names in data["limiter"] for name in names.split(", ")}
    OccupancyBench().check(data)
    assert OccupancyBench().headlines(data)[0].ours == len(data)


def test_a_difference_is_named(on_an_h200):
    data = on_an_h200(lambda *given: simulated(*given) + (given[1] == 96))
    with pytest.raises(LimitError, match=r"configurations differ, the first:\n *kernel"):
        OccupancyBench().check(data)
    with pytest.raises(LimitError, match="num_sms: the row has 132, the driver reports 78; correct the row"):
        OccupancyBench().check(on_an_h200(simulated, told="num_sms: the row has 132, the driver reports 78"))


def test_a_block_that_the_driver_refuses_counts_as_none(on_an_h200):
    def refuse(*given):
        if not simulated(*given):
            raise KernelError("the driver says CUDA_ERROR_INVALID_VALUE")
        return simulated(*given)

    data = on_an_h200(refuse)
    assert data["equal"].all()
    assert data.loc[data["note"] != "", "note"].str.startswith("refused: the driver says").all()
    assert (data.loc[data["note"] != "", "driver_blocks"] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_agrees(tmp_path):
    bench.run("occupancy", tmp_path, quick=True)
