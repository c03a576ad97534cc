"""``fragments-v1``: windows of 4 or 2 bits in the order in which a warp's tensor cores take them (mma.m16n8k16, lane = 4 g + t).

A block is 32 tokens of one KV head. Keys are the operand [tokens, channels], values [channels, tokens], both cut into tiles of 16
by 16. A word of 32 bits holds what one lane needs of one channel tile and of 16 tokens (4 bits) or 32 (2 bits). Code number
`place` of byte `shift` of halfword `e` lies at bit ``16 e + 8 shift + num_bits place``, so ``(word >> 8 shift) & mask`` gives two
subnormal halfs ``2^(num_bits place - 24) code`` at once, which tensor cores multiply as they are. With `octet` a number of eight
tokens of the block, ``(8 / num_bits) (word % words_per_tile) + place``,

- keys: channel ``16 tile + 8 shift + 2t + e``, token ``8 octet + g``;
- values: channel ``16 tile + 8 shift + g``, token ``8 octet + 2t + e``.

So a factor ``2^(num_bits place)`` belongs to tokens alone, and folds into their scores and probabilities. Words of a lane, those
of a channel tile together, lie in chunks of four, chunk by chunk, 16 bytes per lane. Keys come first, then values. `META` is the
order of scales and minima.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError

LAYOUT = "fragments-v1"
BITS = (4, 2)
HEAD_DIMS = (64, 128)
#: Tokens of a block.
BLOCK = 32
#: The parts of a window's metadata, each of head_dim halfs.
META = ("key_scale", "key_minimum", "value_scale", "value_minimum")
Role = Literal["key", "value"]


def code_bytes(num_bits: int, head_dim: int) -> int:
    """Return the bytes of a block's codes, keys and values."""
    return 2 * BLOCK * head_dim * num_bits // 8


def pack(key: Tensor, value: Tensor, num_bits: int) -> Tensor:
    """Return the codes of keys and values in fragment order.

    Parameters
    ----------
    key, value : Tensor
        uint8 [..., tokens, head_dim], each below ``2 ** num_bits``; tokens a multiple of 32, head_dim 64 or 128.
    num_bits : {4, 2}
        Bits per code.

    Returns
    -------
    Tensor
        uint8 [..., tokens / 32, code_bytes].

    Raises
    ------
    ParameterError, UnsupportedError
        For other shapes, bits, dtypes, or a code that needs more bits.
    """
    _check(key, num_bits)
    if key.shape != value.shape or key.dtype != value.dtype:
        raise ParameterError(f"keys {list(key.shape)} and values {list(value.shape)} differ; give those of the same tokens")
    return torch.cat([_packed(key, num_bits, "key"), _packed(value, num_bits, "value")], dim=-1)


def unpack(packed: Tensor, num_bits: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the codes of keys and values, uint8 [..., tokens, head_dim]; the inverse of `pack`."""
    if packed.shape[-1] != code_bytes(num_bits, head_dim):
        raise ParameterError(
            f"a block of {num_bits}-bit codes with head_dim {head_dim} has {code_bytes(num_bits, head_dim)} bytes, got "
            f"{packed.shape[-1]}; pass what `pack` returned"
        )
    key, value = packed.chunk(2, dim=-1)
    return _unpacked(key, num_bits, head_dim, "key"), _unpacked(value, num_bits, head_dim, "value")


def pack_meta(key_scale: Tensor, key_minimum: Tensor, value_scale: Tensor, value_minimum: Tensor) -> Tensor:
    """Return the metadata of windows in fragment order, float16 [..., 4 * head_dim], from parts [..., head_dim]."""
    head_dim = key_scale.shape[-1]
    parts = (key_scale, key_minimum, value_scale, value_minimum)
    if any(part.dtype != torch.float16 or part.shape != key_scale.shape for part in parts) or head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"{LAYOUT} holds float16 metadata of head_dim {' or '.join(map(str, HEAD_DIMS))}, one per channel; got "
            + ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        )
    orders = [_meta_order(head_dim, name.split("_")[0]).to(key_scale.device) for name in META]
    return torch.cat([part[..., order] for part, order in zip(parts, orders, strict=True)], dim=-1)


def unpack_meta(meta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the parts [..., head_dim] of `pack_meta`, in the order of `META`."""
    parts = []
    for part, name in zip(meta.chunk(4, dim=-1), META, strict=True):
        order = _meta_order(part.shape[-1], name.split("_")[0]).to(meta.device)
        parts.append(part[..., order.argsort()])
    return parts[0], parts[1], parts[2], parts[3]


def _check(codes: Tensor, num_bits: int) -> None:
    if num_bits not in BITS:
        raise ParameterError(f"{LAYOUT} holds {' or '.join(map(str, BITS))} bits, not {num_bits}")
    if codes.dtype != torch.uint8 or codes.shape[-1] not in HEAD_DIMS or codes.shape[-2] % BLOCK:
        raise UnsupportedError(
            f"{LAYOUT} holds uint8 codes of head_dim {' or '.join(map(str, HEAD_DIMS))} and whole blocks of {BLOCK} tokens; got "
            f"{codes.dtype} {list(codes.shape)}"
        )
    if codes.numel() and int(codes.max()) >= 2**num_bits:
        raise ParameterError(f"{LAYOUT}: code {int(codes.max())} does not fit {num_bits} bits")


def _packed(codes: Tensor, num_bits: int, role: Role) -> Tensor:
    head_dim = codes.shape[-1]
    order, shifts = _order(num_bits, head_dim, role)
    blocks = codes.reshape(*codes.shape[:-2], codes.shape[-2] // BLOCK, BLOCK * head_dim)
    words = (blocks[..., order.to(codes.device)].long() << shifts.to(codes.device)).sum(-1)
    # Little-endian, as the GPU reads them.
    return torch.stack([(words >> shift & 255).to(torch.uint8) for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)


def _unpacked(packed: Tensor, num_bits: int, head_dim: int, role: Role) -> Tensor:
    order, shifts = (x.to(packed.device) for x in _order(num_bits, head_dim, role))
    four = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4).long()
    words = four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24
    fields = (words.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
    blocks = torch.empty((*packed.shape[:-1], BLOCK * head_dim), dtype=torch.uint8, device=packed.device)
    blocks[..., order.flatten()] = fields.flatten(-2).to(torch.uint8)
    return blocks.reshape(*packed.shape[:-2], packed.shape[-2] * BLOCK, head_dim)


@cache
def _order(num_bits: int, head_dim: int, role: Role) -> tuple[Tensor, Tensor]:
    """Return which code of [32, head_dim] each field of each word is, words in memory order, and the bits where fields begin."""
    places = 8 // num_bits
    per_tile = 4 // places
    words = head_dim // 16 * per_tile
    chunk, lane, in_chunk, e, shift, place = torch.meshgrid(
        torch.arange(words // 4), torch.arange(32), torch.arange(4), torch.arange(2), torch.arange(2), torch.arange(places),
        indexing="ij",
    )  # fmt: skip
    word, g, t = 4 * chunk + in_chunk, lane // 4, lane % 4
    tile, octet = word // per_tile, places * (word % per_tile) + place
    token = 8 * octet + (g if role == "key" else 2 * t + e)
    channel = 16 * tile + 8 * shift + (2 * t + e if role == "key" else g)
    order = (token * head_dim + channel).flatten(3).flatten(0, 2)
    bits = (16 * e + 8 * shift + num_bits * place).flatten(3).flatten(0, 2)[0]
    return order, bits


@cache
def _meta_order(head_dim: int, role: str) -> Tensor:
    """Return the channel of each place of a part: what a lane reads at once lies together."""
    if role == "key":  # [head_dim / 32, t, half, tile of two, e]
        j, t, half, tile, e = torch.meshgrid(*map(torch.arange, (head_dim // 32, 4, 2, 2, 2)), indexing="ij")
        return (16 * (2 * j + tile) + 8 * half + 2 * t + e).flatten()
    j, g, tile, half = torch.meshgrid(*map(torch.arange, (head_dim // 64, 8, 4, 2)), indexing="ij")
    return (16 * (4 * j + tile) + 8 * half + g).flatten()
