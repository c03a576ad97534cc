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


#: Of the memory: bits of the bus, and 1e9 transfers per second and pin (HBM's clock, doubled, where a datasheet prints the clock).
MEMORY = {
    "rtx4090": (384, 21.0), "a40": (384, 14.5), "a100": (5120, 2 * 1.593), "a800": (5120, 2 * 1.593), "h100": (5120, 2 * 2.619),
    "l40s": (384, 18.0),
}  # fmt: skip
#: FP32 cores of a multiprocessor, and TFLOPS as printed: two operations per core and clock.
ARITHMETIC = {
    "rtx4090": (128, 82.6), "a40": (128, 37.4), "a100": (64, 19.5), "a800": (64, 19.5), "h100": (128, 67.0), "h200": (128, 67.0),
    "l40s": (128, 91.6),
}  # fmt: skip


@pytest.mark.parametrize("key", MEMORY)
def test_bandwidth_is_the_width_of_the_bus_times_its_rate(key):
    bits, rate = MEMORY[key]
    assert gpu(key).bandwidth_gb_s == pytest.approx(bits / 8 * rate, rel=1e-3)


def test_an_h200_has_six_stacks_of_hbm_where_an_h100_has_five():
    # The datasheet rounds to 4.8 TB/s; 6,144 bits then run at 6.25e9 transfers per second, below the 9.2e9 that HBM3e is sold for.
    rate = 8 * gpu("h200").bandwidth_gb_s / 6144
    assert 8 * gpu("h100").bandwidth_gb_s / 5120 < rate < 9.2


@pytest.mark.parametrize("key", ARITHMETIC)
def test_clock_and_multiprocessors_give_the_arithmetic_that_is_printed(key):
    cores, tflops = ARITHMETIC[key]
    row = gpu(key)
    assert row.num_sms * cores * 2 * row.boost_clock_mhz / 1e6 == pytest.approx(tflops, rel=2.5e-3)


def test_an_a800_is_an_a100_but_for_its_links():
    fields = set(vars(gpu("a100"))) - {"key", "name", "source"}
    assert {name for name in fields if getattr(gpu("a800"), name) != getattr(gpu("a100"), name)} == set()
