"""Caches for the tests of `mixed_decode`, and the truth about them: SDPA in float64 on what the cache decodes to."""

import torch

from wqlab.ops.mixed_decode import MixedKV, PackedTensor, Segment
from wqlab.quantizers import create

#: ||out - truth|| / ||truth||. The interpreter truncates where it should round to bfloat16.
LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def packed(x, num_bits, window_size=32, granularity="window_channel"):
    return PackedTensor.pack(create("rtn", num_bits, window_size, granularity).quantize(x))


def build(
    batch=1, kv_heads=1, group=1, q_len=1, head_dim=64, dense=0, int4=0, int2=0, tail=0, window_size=32,
    granularity="window_channel", dtype=torch.float16, seed=0, draw=torch.randn, offset=0.0,
):  # fmt: skip
    """Return a query and a cache; `offset` moves one channel of the keys far from zero, as real models have it."""
    torch.manual_seed(seed)

    def kv(tokens):
        key, value = (draw(batch, kv_heads, tokens, head_dim) for _ in range(2))
        key[..., head_dim // 3] += offset
        return key.to(dtype), value.to(dtype)

    segments = [Segment(*kv(dense))]
    for tokens, bits in ((int4, 4), (int2, 2)):
        segments.append(Segment(*(packed(x, bits, window_size, granularity) for x in kv(tokens))))
    query = torch.randn(batch, kv_heads * group, q_len, head_dim).to(dtype)
    return query, MixedKV(tuple(segments), Segment(*kv(tail)))


def decode(side):
    """Return the values of one side in float64, by the quantizer's own decoder and not by the code under test."""
    if isinstance(side, torch.Tensor):
        return side.double()
    from wqlab.layouts import bitpack
    from wqlab.quantizers import Quantized
    from wqlab.types import QuantSpec

    codes = bitpack.unpack(side.codes, side.num_bits, side.head_dim)
    spec = QuantSpec(side.num_bits, side.window_size)
    decoder = create("rtn", side.num_bits, side.window_size)
    return decoder.dequantize(Quantized(codes, side.scale, side.minimum, spec, side.scale.dtype)).double()


def truth(query, cache, scaling=None):
    """Return float64 SDPA row by row: the tokens that a row lacks are cut out, so no mask can be wrong in the same way."""
    group, q_len = query.shape[1] // cache.num_kv_heads, query.shape[2]
    rows = []
    for row in range(cache.batch):
        keys, values = [], []
        for segment in cache.all():
            length = segment.tokens if segment.lengths is None else int(segment.lengths[row])
            kept = torch.ones(length, dtype=torch.bool) if segment.mask is None else segment.mask[row, :length].cpu()
            keys.append(decode(segment.key)[row, :, :length].cpu()[:, kept])
            values.append(decode(segment.value)[row, :, :length].cpu()[:, kept])
        key, value = (torch.cat(parts, dim=1).repeat_interleave(group, dim=0)[None] for parts in (keys, values))
        tokens = key.shape[2]
        causal = torch.arange(tokens) <= tokens - q_len + torch.arange(q_len)[:, None]
        mask = causal if q_len > 1 else None
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(query[row : row + 1].double().cpu(), key, value, mask, scale=scaling)
        )
    return torch.cat(rows)


def error(result, expected):
    return float((result.double().cpu() - expected).norm() / expected.norm())
