import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts.bitpack import LAYOUT, pack, packed_size, unpack


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 131), st.integers(0, 2**31))
def test_round_trip(num_bits, lead, size, seed):
    codes = torch.randint(0, 2**num_bits, (*lead, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, num_bits)
    assert packed.shape == (*lead, packed_size(size, num_bits))
    assert packed.untyped_storage().nbytes() == packed.numel()
    assert torch.equal(unpack(packed, num_bits, size), codes)


def test_version_1_is_little_endian_along_the_last_axis():
    """Stored files depend on this; another order needs another name."""
    assert LAYOUT == "bitpack-v1"
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]
    assert pack(torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8), 2).tolist() == [0b00111001, 0b10]
    assert [packed_size(n, 2) for n in (0, 1, 4, 5, 96)] == [0, 1, 1, 2, 24]


def test_refusals():
    with pytest.raises(ParameterError, match="code 4 does not fit 2 bits"):
        pack(torch.tensor([4], dtype=torch.uint8), 2)
    with pytest.raises(ParameterError, match="num_bits = 3"):
        pack(torch.zeros(4, dtype=torch.uint8), 3)
    with pytest.raises(UnsupportedError, match="int64"):
        pack(torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(ParameterError, match=r"9 codes of 4 bits take 5 bytes per row, got 4"):
        unpack(torch.zeros(4, dtype=torch.uint8), 4, 9)
