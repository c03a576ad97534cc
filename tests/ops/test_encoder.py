"""The encoder's kernel on an emulated GPU: codes and metadata of the quantizer, to the bit, wherever the tokens lie."""

import emulated
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab import codegen
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.ops.mixed_decode import encoder
from wqlab.ops.mixed_decode.encoder import encode_windows


def tokens(batch=2, heads=2, count=200, head_dim=64, seed=0, spread=1.0, offset=0.0):
    torch.manual_seed(seed)
    key, value = ((spread * torch.randn(batch, heads, count, head_dim) + offset).half() for _ in range(2))
    return key, value


def positions_of(batch, windows, size, count, lacking=0):
    """Windows anywhere, in any order; the last of the second row may be lacking."""
    found = torch.stack([torch.randperm(count)[: windows * size].sort().values for _ in range(batch)]).int()
    if lacking:
        found[-1, -lacking * size :] = -1
    return found


def same(got, want):
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.meta, want.meta)  # 0 and -0 are equal: of a channel with both, either may be the minimum


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_bits", [2, 4])
@pytest.mark.parametrize("window_size", [32, 64, 256])  # 256: at head_dim 128 keys and values take turns in shared memory
def test_it_is_the_quantizer_to_the_bit(head_dim, num_bits, window_size):
    count = max(200, 3 * window_size)
    key, value = tokens(head_dim=head_dim, count=count)
    at = positions_of(2, 3, window_size, count, lacking=1)
    same(emulated.encode(key, value, at, num_bits, window_size), encode_windows(key, value, at, num_bits, window_size))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([2, 4]), st.integers(0, 999), st.sampled_from([1e-7, 1e-4, 0.1, 1.0, 300.0, 2e4]),
    st.sampled_from([0.0, 0.5, 300.0, -2e4]), st.booleans(),
)  # fmt: skip
def test_any_range(num_bits, seed, spread, offset, coarse):
    """Subnormal steps, constant channels, the ends of the range; halves of a step, where rounding is to even."""
    key, value = tokens(1, 1, 64, seed=seed, spread=spread, offset=offset)
    key[..., 5], value[..., 7] = offset, 0
    if coarse:  # integers over a few levels: half of all values lie exactly between two codes
        key, value = ((x.float() * 7 / max(spread, 1e-7)).round().clamp(-30, 30).half() for x in (key, value))
    key, value = (x.clamp(-60000, 60000) for x in (key, value))
    at = positions_of(1, 2, 32, 64)
    same(emulated.encode(key, value, at, num_bits, 32), encode_windows(key, value, at, num_bits, 32))


def test_tokens_with_strides():
    key, value = tokens()
    spread = torch.full((2, 200, 2, 3 * 64), torch.nan, dtype=torch.float16)
    spread[..., 64:128] = key.transpose(1, 2)
    at = positions_of(2, 2, 32, 200)
    same(emulated.encode(spread[..., 64:128].transpose(1, 2), value, at, 4, 32), encode_windows(key, value, at, 4, 32))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("encode", [emulated.encode, encode_windows])
def test_nan_is_named_and_outside_of_windows_it_does_not_matter(bad, which, encode):
    sides = tokens(1, 1, 40)
    sides[which][0, 0, 39, 3] = bad
    at = torch.arange(32).int()[None]
    encode(*sides, at, 2, 32)
    with pytest.raises(NonFiniteError, match="NaN"):
        encode(*sides, at + 8, 2, 32)


def test_bad_input_is_refused_by_name():
    key, value = tokens()
    at = positions_of(2, 2, 32, 200)
    for error, match, call in (
        (UnsupportedError, "float32", lambda: encode_windows(key.float(), value, at, 4)),
        (UnsupportedError, "head_dim 32", lambda: encode_windows(key[..., :32], value[..., :32], at, 4)),
        (ParameterError, "num_bits = 8", lambda: encode_windows(key, value, at, 8)),
        (ParameterError, "window_size = 48", lambda: encode_windows(key, value, at, 4, 48)),
        (ParameterError, "int64", lambda: encode_windows(key, value, at.long(), 4)),
        (ParameterError, "one shape", lambda: encode_windows(key, value[:, :, :9], at, 4)),
        (ParameterError, "'hip'", lambda: encode_windows(key, value, at, 4, backend="hip")),
        (UnsupportedError, "lies on cpu", lambda: encode_windows(key, value, at, 4, backend="cuda")),
    ):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_bits", [2, 4])
def test_it_compiles_for_sm_90_without_spills(num_bits, head_dim):
    usage = codegen.compile_cubin(encoder.source(head_dim, num_bits, 32), arch="sm_90").usage["encode_windows"]
    assert not usage.spills


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("num_bits", [2, 4])
def test_it_compiles_for_older_gpus_without_spills(num_bits, arch):
    for head_dim in (64, 128):
        assert not codegen.compile_cubin(encoder.source(head_dim, num_bits, 32), arch=arch).usage["encode_windows"].spills


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_bits", [2, 4])
def test_on_a_gpu(head_dim, num_bits):
    key, value = tokens(head_dim=head_dim, count=2000)
    at = positions_of(2, 40, 32, 2000, lacking=3)
    got = encode_windows(key.cuda(), value.cuda(), at.cuda(), num_bits, backend="cuda")
    want = encode_windows(key, value, at, num_bits)
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.meta.cpu(), want.meta)
