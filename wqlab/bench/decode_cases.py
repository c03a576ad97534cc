"""Random calls of `mixed_decode` with their truth: any shape, ragged rows, masks, channels far from zero, NaN in tokens no row has.

A seed decides everything. The truth is computed from the codes before they are packed, so no layout can be wrong in it, and row by
row with the tokens that a row lacks cut out, so no mask can be wrong in it either.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wqlab.ops.mixed_decode import FragmentSegment, MixedKV, Segment
    from wqlab.quantizers import Quantized


@dataclass(frozen=True)
class DecodeCase:
    """What a call of `mixed_decode` looks like; `draw` and `draw_alike` make them.

    Parameters
    ----------
    seed : int
        Of its content.
    batch, kv_heads, group, q_len, head_dim : int
        Shape; `group` query heads share a KV head.
    window_size, int4_tokens, int2_tokens, dense_tokens : int
        Tokens held per width; packed ones are whole windows.
    dense_as : {"tail", "segment", ""}
        Where dense tokens lie; queries of several tokens need a tail.
    lengths : tuple of tuple of int
        (4 bits, 2 bits, dense) of every row, or empty: every row has all tokens.
    mask : bool
        Whether three of ten tokens are masked.
    offset : float
        Added to one channel of the keys.
    dtype : {"float16", "bfloat16"}
        Of query, dense tokens and metadata.
    empty_segments : bool
        Whether a width without tokens is held as a segment of no tokens, or left out.
    """

    seed: int
    batch: int
    kv_heads: int
    group: int
    q_len: int
    head_dim: int
    window_size: int
    int4_tokens: int
    int2_tokens: int
    dense_tokens: int
    dense_as: Literal["tail", "segment", ""]
    lengths: tuple[tuple[int, int, int], ...] = ()
    mask: bool = False
    offset: float = 0.0
    dtype: Literal["float16", "bfloat16"] = "float16"
    empty_segments: bool = False

    @property
    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """The tokens of every row: (4 bits, 2 bits, dense)."""
        return self.lengths or ((self.int4_tokens, self.int2_tokens, self.dense_tokens),) * self.batch


class Built(NamedTuple):
    """A case's tensors.

    Parameters
    ----------
    query, cache
        Arguments of `mixed_decode`.
    truth : Tensor
        float64, from ``code * scale + minimum`` in float64.
    truth_rounded : Tensor
        float64, from the same rounded to the dtype of the metadata, which is what the Triton kernel and the reference decode to;
        NaN where `build` was told to leave it out.
    """

    query: Tensor
    cache: MixedKV
    truth: Tensor
    truth_rounded: Tensor


def draw(seed: int, largest: int = 4096) -> DecodeCase:
    """Return a case in float16 for any kernel of fragment order; small ones are as frequent as large ones.

    Parameters
    ----------
    seed : int
        Decides all of it, whatever the device.
    largest : int
        Tokens per width and row at most.
    """
    pick = random.Random(seed)
    q_len = pick.choice((1, 1, 1, 1, 1, 2, 3, 7, 16, 33, 64))
    few = q_len > 1  # scores in float64 are held whole
    window_size = 32 * pick.choice((1, 1, 1, 2, 3, 4, 5, 6, 7, 8))
    windows = [_log_uniform(pick, largest // window_size) if pick.random() < 0.8 else 0 for _ in range(2)]
    dense_as: Literal["tail", "segment", ""] = "tail" if few else pick.choice(("tail", "tail", "segment", ""))
    if not any(windows) and not dense_as:
        dense_as = "tail"
    dense = q_len - 1 + _log_uniform(pick, max(largest // 4, 1)) if dense_as else 0
    case = DecodeCase(
        seed, batch=pick.randint(1, 2 if few else 5), kv_heads=pick.choice((1, 2) if few else (1, 1, 2, 3, 4, 8)),
        group=pick.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)), q_len=q_len, head_dim=pick.choice((64, 128)),
        window_size=window_size, int4_tokens=windows[0] * window_size, int2_tokens=windows[1] * window_size, dense_tokens=dense,
        dense_as=dense_as, mask=pick.random() < 0.3, offset=pick.choice((0.0, 0.0, pick.uniform(0, 300), 300.0)),
        empty_segments=pick.random() < 0.2,
    )  # fmt: skip
    return dataclasses.replace(case, lengths=_lengths(case, pick) if pick.random() < 0.6 else ())


#: Kinds of cases for a backend that compiles each kind for seconds: all else than what they name differs from case to case.
ALIKE: tuple[dict[str, Any], ...] = (
    {"kv_heads": 4, "group": 7, "head_dim": 128, "window_size": 32, "widths": "42", "dense_as": "tail"},
    {"kv_heads": 2, "group": 4, "head_dim": 64, "window_size": 64, "widths": "42", "dense_as": "tail", "mask": True},
    {"kv_heads": 8, "group": 4, "head_dim": 128, "window_size": 128, "widths": "4", "dense_as": "segment"},
    {"kv_heads": 1, "group": 2, "head_dim": 128, "window_size": 32, "widths": "2", "dense_as": "tail", "long": True},
)


def draw_alike(seed: int, kind: int, largest: int = 4096) -> DecodeCase:
    """Return a case in bfloat16 of kind ``ALIKE[kind]``; all cases of a kind run the same compiled kernel."""
    pick, given = random.Random(seed), dict(ALIKE[kind])
    widths, long = given.pop("widths"), given.pop("long", False)
    # Query rows up to 16 share a tile; a long question fills tiles of 64.
    q_len = pick.choice((17, 32)) if long else 1 if given["dense_as"] == "segment" else pick.randint(1, 16 // given["group"])
    size = given["window_size"]
    four, two = (size * _log_uniform(pick, largest // size) if bits in widths else 0 for bits in "42")
    dense = 16 * _log_uniform(pick, largest // 64) + 64  # a multiple of 16, as strides of masks that Triton takes for aligned
    case = DecodeCase(
        seed, batch=pick.randint(1, 2 if long else 5), q_len=q_len, int4_tokens=four, int2_tokens=two, dense_tokens=dense,
        offset=pick.choice((0.0, pick.uniform(0, 300), 300.0)), dtype="bfloat16", **given,
    )  # fmt: skip
    return dataclasses.replace(case, lengths=_lengths(case, pick))


def build(case: DecodeCase, device: torch.device, rounded_too: bool = True) -> Built:
    """Return the tensors of a case on `device`, and what attention over them is.

    Parameters
    ----------
    case : DecodeCase
        Content is random per seed and kind of device. Windows lie in fragment order in float16, row by row in bfloat16, which that
        order does not hold.
    device : torch.device
        Where everything is made.
    rounded_too : bool
        Whether `Built.truth_rounded` is computed.
    """
    import torch

    from wqlab import quantizers
    from wqlab.ops.mixed_decode import MixedKV, Segment

    dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    def tokens(count: int) -> list[Tensor]:
        sides = [normal(case.batch, case.kv_heads, count, case.head_dim) for _ in range(2)]
        sides[0][..., case.seed % case.head_dim] += case.offset
        return [x.to(dtype) for x in sides]

    def mask_of(count: int, column: int) -> Tensor | None:
        if not case.mask:
            return None
        kept = torch.rand((case.batch, count), device=device, generator=generator) > 0.3
        if column == 2 and case.q_len > 1:  # the queries' own tokens
            for row, held in enumerate(case.rows):
                kept[row, max(held[2] - case.q_len, 0) : held[2]] = True
        return kept

    segments: list[Segment | FragmentSegment] = []
    tail: Segment | None = None
    exact: list[tuple[Tensor, Tensor, Tensor | None]] = []
    rounded: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for column, (bits, count) in enumerate(((4, case.int4_tokens), (2, case.int2_tokens))):
        mask, held = mask_of(count, column), [row[column] for row in case.rows]
        if count or case.empty_segments:
            coders = [quantizers.create("rtn", bits, case.window_size, "window_channel", role) for role in ("key", "value")]
            coded = [coder.quantize(x) for coder, x in zip(coders, tokens(count), strict=True)]
            exact.append((_exact(coded[0]), _exact(coded[1]), mask))
            if rounded_too:
                decoded = [coder.dequantize(x).double() for coder, x in zip(coders, coded, strict=True)]
                rounded.append((decoded[0], decoded[1], mask))
            segments.append(_packed(coded, held if case.lengths else None, mask))
        else:
            for parts in (exact, rounded):
                parts.append((*(normal(case.batch, case.kv_heads, 0, case.head_dim).double() for _ in range(2)), None))  # type: ignore[arg-type]
    key, value = tokens(case.dense_tokens)
    mask, held = mask_of(case.dense_tokens, 2), [row[2] for row in case.rows]
    for parts in (exact, rounded):
        parts.append((key.double(), value.double(), mask))
    if case.dense_as:
        # What no row has is never read, or read and thrown away: NaN there must not show.
        present = torch.arange(case.dense_tokens, device=device) < torch.tensor(held, device=device)[:, None]
        absent = ~(present if mask is None else present & mask)[:, None, :, None]
        lengths = torch.tensor(held, dtype=torch.int32, device=device) if case.lengths else None
        dense = Segment(key.masked_fill(absent, math.nan), value.masked_fill(absent, math.nan), lengths, mask)
        if case.dense_as == "tail":
            tail = dense
        else:
            segments.append(dense)
    query = normal(case.batch, case.kv_heads * case.group, case.q_len, case.head_dim).to(dtype)
    truth = attend(query, exact, case)
    truth_rounded = attend(query, rounded, case) if rounded_too else torch.full_like(truth, math.nan)
    return Built(query, MixedKV(tuple(segments), tail), truth, truth_rounded)


def attend(query: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]], case: DecodeCase) -> Tensor:
    """Return attention in float64 over keys, values and masks of (4 bits, 2 bits, dense); a row without tokens gives 0."""
    import torch

    grouped = query.double().reshape(case.batch, case.kv_heads, case.group * case.q_len, case.head_dim) * case.head_dim**-0.5
    outputs = []
    for row, held in enumerate(case.rows):
        keys, values = [], []
        for count, (key, value, mask) in zip(held, parts, strict=True):
            kept = slice(None) if mask is None else mask[row, :count]
            keys.append(key[row, :, :count][:, kept])
            values.append(value[row, :, :count][:, kept])
        key, value = torch.cat(keys, dim=1), torch.cat(values, dim=1)
        scores = grouped[row] @ key.mT
        if case.q_len > 1:
            count = key.shape[1]
            newest = count - case.q_len + torch.arange(case.q_len, device=query.device)
            later = torch.arange(count, device=query.device) > newest[:, None]
            scores = scores.masked_fill(later.repeat(case.group, 1), -torch.inf)
        outputs.append(scores.softmax(-1) @ value)
    return torch.stack(outputs).reshape(query.shape)


def relative_error(output: Tensor, truth: Tensor) -> float:
    """Return ``||output - truth|| / ||truth||``; infinity where `output` is not finite, or not 0 where the truth is."""
    import torch

    if not bool(output.isfinite().all()) or bool(output[truth == 0].any()):
        return math.inf
    norm = float(torch.linalg.vector_norm(truth))
    return float(torch.linalg.vector_norm(output.double() - truth)) / norm if norm else 0.0


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill whatever torch allocates inside the block with NaN, and integers with their largest: what is not written shows."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _log_uniform(pick: random.Random, most: int) -> int:
    return min(round(math.exp(pick.uniform(0, math.log(max(most, 1)) + 0.1))), max(most, 1))


def _lengths(case: DecodeCase, pick: random.Random) -> tuple[tuple[int, int, int], ...]:
    """Return ragged rows: some whole, some without a token, some without windows of a width."""
    rows = []
    for _ in range(case.batch):
        kind, size = pick.random(), case.window_size
        if kind < 0.15:  # a sequence of length zero
            rows.append((0, 0, 0))
            continue
        if kind < 0.3:
            rows.append((case.int4_tokens, case.int2_tokens, case.dense_tokens))
            continue
        four, two = (
            0 if pick.random() < 0.2 else size * pick.randint(0, tokens // size) for tokens in (case.int4_tokens, case.int2_tokens)
        )
        # A tail that holds some of the query tokens only is no call that anybody makes.
        least = case.q_len if case.q_len > 1 else 0
        rows.append((four, two, pick.randint(least, case.dense_tokens) if case.dense_as else 0))
    return tuple(rows)


def _exact(coded: Quantized) -> Tensor:
    batch, heads, tokens, head_dim = coded.codes.shape
    size = coded.spec.window_size
    codes = coded.codes.double().reshape(batch, heads, tokens // size, size, head_dim)
    values: Tensor = codes * coded.scale.double().unsqueeze(3) + coded.minimum.double().unsqueeze(3)
    return values.reshape(coded.codes.shape)


def _packed(coded: list[Quantized], held: list[int] | None, mask: Tensor | None) -> Segment | FragmentSegment:
    """Return the segment, with NaN and codes of ones in the windows that a row does not have."""
    import torch

    from wqlab.ops.mixed_decode import FragmentSegment, PackedTensor, Segment

    size = coded[0].spec.window_size
    lengths = None if held is None else torch.tensor(held, dtype=torch.int32, device=coded[0].codes.device)
    if coded[0].scale.dtype == torch.float16:
        segment = FragmentSegment.pack(coded[0], coded[1], lengths)
        for row, count in enumerate(held or ()):
            segment.codes[row, :, count // 32 :] = 0xFF
            segment.meta[row, :, count // size :] = math.nan
        return dataclasses.replace(segment, mask=mask)
    sides = [PackedTensor.pack(x) for x in coded]
    for side in sides:
        for row, count in enumerate(held or ()):
            side.codes[row, :, count:] = 0xFF
            side.scale[row, :, count // size :] = math.nan
            side.minimum[row, :, count // size :] = math.nan
    return Segment(sides[0], sides[1], lengths, mask)
