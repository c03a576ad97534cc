import pytest

from wqlab import records
from wqlab.errors import UnknownNameError
from wqlab.simulate.gpus import GPUS, gpu


def test_every_gpu_that_has_records_of_its_own_has_a_row():
    assert set(GPUS) == set(records.GPU_KEYS) - {"other", "cpu"}


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200", "RTX 4090", "NVIDIA GeForce RTX-4090", "rtx_4090", "L40S"])
def test_names_as_people_write_them(name):
    assert gpu(name).key in name.lower().replace(" ", "").replace("-", "").replace("_", "")


@pytest.mark.parametrize("name", ["B200", "", "40", "h2000"])
def test_an_unknown_gpu_is_refused_with_the_known_ones(name):
    with pytest.raises(UnknownNameError, match="a100, a40, a800, h100, h200, l40s, rtx4090"):
        gpu(name)


@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
def test_rows_are_consistent(row):
    assert row.source
    assert row.carve_outs == tuple(sorted(row.carve_outs))
    assert row.shared_bytes_per_sm < row.l1_bytes
    assert row.max_threads_per_sm % row.warp_size == 0
    assert row.num_banks * row.bank_bytes == 128
    assert 1 < row.bytes_per_clock_and_sm < 32
    assert any(word in row.name for word in ("SXM", "PCIe"))


def test_the_papers_ratio_of_bandwidth_and_what_an_sm_gets_per_clock():
    assert gpu("a40").bandwidth_gb_s / gpu("rtx4090").bandwidth_gb_s == pytest.approx(0.67, abs=0.03)
    assert gpu("rtx4090").bytes_per_clock_and_sm == pytest.approx(3.1, abs=0.05)
    assert gpu("h200").bytes_per_clock_and_sm == pytest.approx(18.4, abs=0.1)
