"""bitstream-v1: a Python integer as its twin, every width, exact round trips, bad inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitpack, bitstream


@st.composite
def rows_of_codes(draw):
    num_bits = draw(st.integers(1, 16))
    size = draw(st.integers(0, 37))
    rows = draw(st.lists(st.lists(st.integers(0, 2**num_bits - 1), min_size=size, max_size=size), min_size=1, max_size=3))
    return num_bits, size, rows


@given(rows_of_codes(), st.sampled_from([torch.int32, torch.int64]))
def test_a_row_is_one_large_number(case, dtype):
    num_bits, size, rows = case
    packed = bitstream.pack(torch.tensor(rows, dtype=dtype).reshape(len(rows), size), num_bits)
    assert packed.dtype == torch.uint8
    for row, found in zip(rows, packed, strict=True):
        number = sum(code << (place * num_bits) for place, code in enumerate(row))
        assert bytes(found.tolist()) == number.to_bytes(bitstream.packed_size(size, num_bits), "little")
    codes = bitstream.unpack(packed, num_bits, size)
    assert codes.dtype == torch.int32
    assert codes.tolist() == rows


def test_two_codes_of_twelve_bits_by_hand():
    packed = bitstream.pack(torch.tensor([0xABC, 0x123]), 12)
    assert packed.tolist() == [0xBC, 0x3A, 0x12]
    assert bitstream.unpack(packed, 12, 2).tolist() == [0xABC, 0x123]
    assert bitstream.packed_size(3, 12) == 5


@pytest.mark.parametrize("num_bits", bitpack.BITS)
def test_aligned_widths_are_those_of_bitpack(num_bits):
    codes = torch.randint(0, 2**num_bits, (2, 3, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bitstream.pack(codes, num_bits), bitpack.pack(codes, num_bits))


def test_views_are_read_as_they_are():
    codes = torch.arange(24).reshape(4, 6)
    assert torch.equal(bitstream.pack(codes.T, 5), bitstream.pack(codes.T.contiguous(), 5))
    packed = bitstream.pack(codes, 5)
    assert torch.equal(bitstream.unpack(packed.repeat_interleave(2, 0)[::2], 5, 6).long(), codes)


def test_bad_input_is_named():
    codes = torch.arange(5)
    for num_bits in (0, 17, True, 2.0):
        with pytest.raises(ParameterError, match="is not a whole number from 1 to 16"):
            bitstream.pack(codes, num_bits)
    with pytest.raises(ParameterError, match="codes from 0 to 4 do not fit 2 bits"):
        bitstream.pack(codes, 2)
    with pytest.raises(ParameterError, match="codes from -1 to 3 do not fit 12 bits"):
        bitstream.pack(codes - 1, 12)
    with pytest.raises(UnsupportedError, match=r"packs whole numbers, got torch.float32"):
        bitstream.pack(codes.float(), 12)
    with pytest.raises(ParameterError, match="5 codes of 12 bits take 8 bytes per row, got 7"):
        bitstream.unpack(torch.zeros(7, dtype=torch.uint8), 12, 5)
    with pytest.raises(UnsupportedError, match=r"unpacks uint8, got torch.int32"):
        bitstream.unpack(torch.zeros(8, dtype=torch.int32), 12, 5)
