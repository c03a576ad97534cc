"""The fragment order against the PTX manual's tables, written out here a second time, and against its own inverse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import fragments


def codes(shape, bits, seed=0):
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(
    st.sampled_from(fragments.BITS), st.sampled_from(fragments.HEAD_DIMS), st.integers(0, 3), st.integers(1, 3), st.integers(0, 99)
)
def test_unpack_is_the_inverse(bits, head_dim, blocks, heads, seed):
    key, value = (codes((2, heads, 32 * blocks, head_dim), bits, seed + i) for i in range(2))
    packed = fragments.pack(key, value, bits)
    assert packed.shape == (2, heads, blocks, fragments.code_bytes(bits, head_dim))
    for got, want in zip(fragments.unpack(packed, bits, head_dim), (key, value), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("head_dim", fragments.HEAD_DIMS)
@pytest.mark.parametrize("bits", fragments.BITS)
def test_every_lane_finds_its_rows_and_columns(bits, head_dim):
    """What a lane's four registers of a tile must hold, by the table of mma.m16n8k16's first operand."""
    key, value = codes((32, head_dim), bits), codes((32, head_dim), bits, 1)
    packed = fragments.pack(key, value, bits)[0].view(torch.int32).long() & 0xFFFFFFFF
    tiles, per_tile = head_dim // 16, bits // 2
    words = tiles * per_tile
    both = packed.reshape(2, words // 4, 32, 4).transpose(2, 3).reshape(2, words, 32)

    def register(role, tile, lane, octet, shift):
        """Of eight tokens and eight channels: which word, and which place in its bytes."""
        places = 8 // bits
        word = int(both[role, tile * per_tile + octet // places, lane])
        return [(word >> (16 * e + 8 * shift + bits * (octet % places))) % 2**bits for e in range(2)]

    for lane in range(32):
        g, t = lane // 4, lane % 4
        for tile in range(tiles):
            for octet in range(4):
                for eight in range(2):
                    channel = 16 * tile + 8 * eight
                    row = key[8 * octet + g, channel + 2 * t :][:2]
                    assert register(0, tile, lane, octet, eight) == row.tolist()
                    column = value[8 * octet + 2 * t :, channel + g][:2]
                    assert register(1, tile, lane, octet, eight) == column.tolist()


@pytest.mark.parametrize("head_dim", fragments.HEAD_DIMS)
def test_metadata_come_back(head_dim):
    parts = [torch.randn(2, 3, head_dim).half() for _ in range(4)]
    meta = fragments.pack_meta(*parts)
    assert meta.shape == (2, 3, 4 * head_dim)
    for got, want in zip(fragments.unpack_meta(meta), parts, strict=True):
        assert torch.equal(got, want)


def test_refusals():
    good = codes((32, 64), 4)
    with pytest.raises(ParameterError, match="not 8"):
        fragments.pack(good, good, 8)
    with pytest.raises(UnsupportedError, match="96"):
        fragments.pack(codes((32, 96), 4), codes((32, 96), 4), 4)
    with pytest.raises(UnsupportedError, match="33"):
        fragments.pack(codes((33, 64), 4), codes((33, 64), 4), 4)
    with pytest.raises(ParameterError, match="differ"):
        fragments.pack(good, codes((64, 64), 4), 4)
    with pytest.raises(ParameterError, match="does not fit 2 bits"):
        fragments.pack(good, good, 2)
    with pytest.raises(ParameterError, match="2048 bytes, got 8"):
        fragments.unpack(torch.zeros(1, 8, dtype=torch.uint8), 4, 64)
    with pytest.raises(UnsupportedError, match="float16"):
        fragments.pack_meta(*[torch.zeros(64)] * 4)
