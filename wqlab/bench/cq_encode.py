"""What coupled quantization costs a layer: encoding its keys and values, against its own linear projections.

The layer is Llama-7B's. Keys and values are synthetic: correlated channels, two of each head large and off centre; their codebooks
are a few rounds of k-means on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab import progress
from wqlab.bench import Bench, Headline
from wqlab.errors import LimitError, MissingPartError
from wqlab.profile import environment
from wqlab.profile.timing import Timing, launch_times, rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor


class Layer(NamedTuple):
    """Sizes of a layer.

    Parameters
    ----------
    heads, head_dim : int
        Of keys and of values.
    projections : tuple of (int, int)
        Output and input features of its linear projections.
    """

    heads: int
    head_dim: int
    projections: tuple[tuple[int, int], ...]


class Tokens(NamedTuple):
    """Tokens that come at once: rows, and tokens of each."""

    batch: int
    seq_len: int


LLAMA_7B = Layer(32, 128, ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),))
TINY = Layer(2, 32, ((64, 64),) * 7)
#: Prompts, and one decode step of 16 rows.
TOKENS = (Tokens(1, 256), Tokens(1, 1024), Tokens(1, 4096), Tokens(1, 16384), Tokens(16, 1))
QUICK = (Tokens(1, 48), Tokens(2, 1))
#: CQ-4 and CQ-2.
VECTOR_SIZES = (2, 4)
NUM_ENTRIES = 256
#: Other ways to compile the kernel, by vector size, measured with `_TUNED` tokens; as `wqlab.ops.cq_encode.triton_kernel.Tiling`.
TILINGS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((128, 4, 64, 16, 4), (128, 4, 32, 16, 4, 128), (128, 4, 32, 32, 4), (64, 4, 32, 16, 4, 128), (128, 8, 64, 16, 4, 128)),
    4: ((128, 4, 64, 16, 4), (64, 4, 64, 64, 4), (128, 8, 64, 32, 4), (64, 4, 32, 32, 2, 128), (128, 8, 64, 32, 4, 128)),
}
_TUNED = Tokens(1, 4096)
#: The slower ways are not asked to encode more than this.
_MOST_SLOW_TOKENS = 4096
#: torch's ways hold a distance to every entry; this many tokens are done at a time.
_TOKENS_AT_ONCE = 1024
#: A call that takes longer is timed alone, thrice, and not in a graph.
_LONG_US = 1000.0
#: Tokens whose codes are compared with float64.
_CHECKED = 256
SEED = 0
_ROUNDS = 4
_Variant = Callable[["Tensor", "Codebooks"], Callable[[], object]]


class Codebooks(NamedTuple):
    """Entries float32 [heads, groups, num_entries, vector_size], and the codes that a launch writes."""

    entries: Tensor
    codes: Tensor


@register("bench", "cq_encode")
class CQEncodeBench(Bench):
    """The kernel needs a CUDA device. A quick run on a CPU shows the table with the reference's times, which mean nothing."""

    name = "cq_encode"
    description = "encode a Llama-7B layer's keys and values with CQ codebooks against its linear projections (1 min, a GPU)"
    columns = {  # noqa: RUF012
        "op": "cq_encode",
        "variant": "triton (the kernel), the same in another tiling, triton float32 (no tensor cores), or a way of torch",
        "tiling": "of the kernel: vectors of a step, warps, entries of a product, classes, books of a program, most registers",
        "vector_size": "channels that share a code: 2 for CQ-4, 4 for CQ-2",
        "num_entries": "entries of a codebook",
        "batch": "rows",
        "seq_len": "tokens of a row",
        "tokens": "of all rows",
        "heads": "of keys, and of values",
        "head_dim": "channels of a head",
        "latency_us": "median time to encode keys and values of the layer, us; in a CUDA graph over rotated data, long calls alone",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph, or calls",
        "copies": "of keys, values and codebooks that the graph rotates through; together four times the L2 cache, or two",
        "us_per_token_layer": "latency_us / tokens, us",
        "linears_us": "the layer's seven linear projections on as many tokens, bf16 in torch, same run, us",
        "share_of_linears": "latency_us / linears_us",
        "checked": "codes of keys that were compared with the nearest entries in float64",
        "mismatches": "of them that name another entry",
        "excess_of_bound": "largest of (squared distance - least) / what the op's `reference.bound` allows; a kernel's limit is 1",
        "mse_ratio": "mean squared distance to the named entry over that to the nearest",
        "note": "what went wrong, else empty",
        "data": "what was encoded",
        "seed": "of keys and values",
        "provenance": "GPU, commit and day",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per variant, vector size and number of tokens.

        Raises
        ------
        MissingPartError
            Without a CUDA device, unless the run is a quick one.
        """
        import pandas as pd
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu" and not quick:
            raise MissingPartError(
                f"{self.name} is measured on a CUDA device, and torch finds none; --quick shows the table without"
            )
        layer, all_tokens = (TINY, QUICK) if quick else (LLAMA_7B, TOKENS)
        repeats = 3 if quick else 20
        rows = []
        for i, tokens in enumerate(all_tokens):
            linears = _linears(layer, tokens, device, repeats)
            for size in VECTOR_SIZES:
                case = _Case(layer, tokens, size, device)
                for name, tiling, variant in _variants(tokens, size, device, quick):
                    progress.report(f"{tokens.batch} x {tokens.seq_len}, vectors of {size}, {name} {tiling}", i, len(all_tokens))
                    rows.append(
                        {
                            **tokens._asdict(), "vector_size": size, "variant": name, "tiling": tiling, "linears_us": linears,
                            **case.measured(variant, repeats),
                        }
                    )  # fmt: skip
                del case
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        data = pd.DataFrame(rows).assign(
            op="cq_encode", num_entries=NUM_ENTRIES, heads=layer.heads, head_dim=layer.head_dim, data="synthetic", seed=SEED
        )
        data["tokens"] = data["batch"] * data["seq_len"]
        data["us_per_token_layer"] = data["latency_us"] / data["tokens"]
        data["share_of_linears"] = data["latency_us"] / data["linears_us"]
        found = environment.provenance()
        data["provenance"] = f"{environment.hardware_line()}, commit {found['git_commit'][:12]}, {found['date'][:10]}"
        counts = dict.fromkeys(("repeats", "copies", "checked", "mismatches"), "Int64")
        return data[list(self.columns)].astype(counts)

    def check(self, data: pd.DataFrame) -> None:
        """Raise LimitError where the kernel failed, or named an entry that is farther than its bound allows."""
        kernel = data[data["variant"] == "triton"]
        bad = kernel[kernel["latency_us"].isna() | ~(kernel["excess_of_bound"] <= 1)]
        if len(bad):
            first = bad.iloc[0]
            raise LimitError(
                f"cq_encode: {len(bad)} of {len(kernel)} rows of the kernel failed, first {first['batch']} x {first['seq_len']} "
                f"tokens in vectors of {first['vector_size']}: excess_of_bound {first['excess_of_bound']}, {first['note']}"
            )

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the time per token and layer at every number of tokens, beside the fastest of torch's own ways."""
        found = []
        for _, rows in data.groupby(["vector_size", "batch", "seq_len"], sort=False):
            size, batch, seq_len = (int(rows.iloc[0][name]) for name in ("vector_size", "batch", "seq_len"))
            times = rows.set_index("variant")["us_per_token_layer"]
            ours = rows.loc[rows["variant"] == "triton", "us_per_token_layer"]
            if ours.notna().any():
                others = times[[name for name in times.index if name.startswith(("torch", "reference"))]]
                theirs = float(others.min()) if others.notna().any() else None
                metric = f"encode keys and values of a layer, CQ-{8 // size}, {batch} x {seq_len:,} tokens, per token"
                found.append(Headline(metric, float(ours.iloc[0]), theirs, "us"))
        return found


class _Case:
    """Keys, values and codebooks of a layer, as often as the rotation needs them."""

    def __init__(self, layer: Layer, tokens: Tokens, size: int, device: torch.device) -> None:
        import torch

        generator = torch.Generator(device).manual_seed(SEED)
        self.device, self.size = device, size
        groups = layer.head_dim // size
        books = 2 * layer.heads * groups
        # A kernel reads its own form of the codebooks, which is never smaller than half of the entries.
        used = 4 * layer.heads * layer.head_dim * tokens.batch * tokens.seq_len + 2 * books * NUM_ENTRIES * size
        self.copies = rotation(used, device)
        sides = [_learnt(layer, size, generator) for _ in range(2)]
        self.sides: list[list[tuple[Tensor, Codebooks]]] = []
        for _ in range(self.copies):
            self.sides.append([])
            for draw, entries in sides:
                x = draw(tokens.batch, tokens.seq_len).half()
                codes = torch.empty((*x.shape[:3], groups), dtype=torch.uint8, device=device)
                self.sides[-1].append((x, Codebooks(entries.clone(), codes)))

    def measured(self, variant: _Variant, repeats: int) -> dict[str, Any]:
        """Return latency and errors of one variant, or the note of its failure."""
        row: dict[str, Any] = {
            "latency_us": math.nan, "p10_us": math.nan, "p90_us": math.nan, "repeats": None, "copies": self.copies,
            "checked": None, "mismatches": None, "excess_of_bound": math.nan, "mse_ratio": math.nan, "note": "",
        }  # fmt: skip
        try:
            for _, books in self.sides[0]:
                books.codes.fill_(NUM_ENTRIES - 1)
            launches = [_both(*(variant(x, books) for x, books in sides)) for sides in self.sides]
            launches[0]()
            row |= self._errors()
            found = _time(launches, self.device, repeats)
        except Exception as failed:  # whatever stops one variant, the others may still be measured, and the row says what it was
            return {**row, "note": f"{type(failed).__name__}: {' '.join(str(failed).split())}"[:300]}
        return {
            **row, "latency_us": found.median_us, "p10_us": found.p10_us, "p90_us": found.p90_us, "repeats": found.repeats,
        }  # fmt: skip

    def _errors(self) -> dict[str, Any]:
        from wqlab.ops.cq_encode import reference

        x, books = self.sides[0][0]
        part = slice(0, max(_CHECKED // x.shape[0], 1))
        excess, least = reference.excess(x[:, :, part], books.entries, books.codes[:, :, part])
        bound = reference.bound(x[:, :, part], books.entries, least)
        return {
            "checked": excess.numel(), "mismatches": int((excess > 0).sum()), "excess_of_bound": float((excess / bound).max()),
            "mse_ratio": float((least + excess).mean() / least.mean()),
        }  # fmt: skip


def _both(*launches: Callable[[], object]) -> Callable[[], object]:
    return lambda: [launch() for launch in launches]


def _time(launches: list[Callable[[], object]], device: torch.device, repeats: int) -> Timing:
    """Return the time of a launch: of a graph, or of calls that are long enough to be timed alone."""
    import numpy as np
    import torch

    if device.type == "cpu":
        return launch_times(launches, device, 1, warmup=0)
    times = []
    for turn in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launches[turn % len(launches)]()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    if min(times) < _LONG_US:
        return launch_times(launches, device, repeats)
    p10, median, p90 = np.percentile(times[1:], [10, 50, 90])
    return Timing(float(median), float(p10), float(p90), len(times) - 1, 1)


def _linears(layer: Layer, tokens: Tokens, device: torch.device, repeats: int) -> float:
    """Return the time of the layer's linear projections, us: bf16, in torch."""
    import torch

    count = tokens.batch * tokens.seq_len
    pairs = [
        (torch.randn(count, features, device=device).bfloat16(), torch.randn(rows, features, device=device).bfloat16())
        for rows, features in layer.projections
    ]
    copies = rotation(sum(w.nbytes for _, w in pairs), device)
    weights = [pairs] + [[(x, w.clone()) for x, w in pairs] for _ in range(copies - 1)]
    launches = [functools.partial(lambda own: [x @ w.T for x, w in own], own) for own in weights]
    return launch_times(launches, device, repeats).median_us


def _learnt(layer: Layer, size: int, generator: torch.Generator) -> tuple[Callable[[int, int], Tensor], Tensor]:
    """Return what draws keys [batch, heads, seq, head_dim], and entries learnt from some of them."""
    import torch

    from wqlab.ops.cq_encode import reference

    device, (heads, head_dim) = generator.device, layer[:2]
    factors = torch.randn(heads, 16, head_dim, device=device, generator=generator) / 4
    spread, offset = torch.ones(head_dim, device=device), torch.zeros(head_dim, device=device)
    spread[[3, head_dim - 5]], offset[[3, head_dim - 5]] = 8.0, 20.0

    def draw(batch: int, seq: int) -> Tensor:
        hidden = torch.randn(batch, heads, seq, 16, device=device, generator=generator)
        noise = torch.randn(batch, heads, seq, head_dim, device=device, generator=generator)
        return (hidden @ factors + 0.3 * noise) * spread + offset

    sample = draw(1, 4 * NUM_ENTRIES)
    grouped = sample[0].reshape(heads, 4 * NUM_ENTRIES, head_dim // size, size).transpose(1, 2)
    entries = grouped[:, :, :NUM_ENTRIES].contiguous()
    for _ in range(_ROUNDS):
        codes = reference.encode(sample, entries)[0].transpose(1, 2).long()[..., None]
        ones = torch.ones_like(grouped[..., :1])
        counts = torch.zeros_like(entries[..., :1]).scatter_add_(2, codes, ones)
        sums = torch.zeros_like(entries).scatter_add_(2, codes.expand_as(grouped), grouped)
        entries = torch.where(counts > 0, sums / counts.clamp(min=1), entries)
    return draw, entries.half().float()


def _variants(tokens: Tokens, size: int, device: torch.device, quick: bool) -> list[tuple[str, str, _Variant]]:
    """Return name, tiling and maker of launches of each variant that serves so many tokens."""
    found: list[tuple[str, str, _Variant]] = []
    if device.type == "cuda":
        from wqlab.ops.cq_encode.triton_kernel import TILINGS as OWN

        tilings: list[tuple[int | None, ...]] = [tuple(OWN[size])]
        if tokens == _TUNED:
            tilings += TILINGS[size]
        for tiling in tilings:
            name = "triton" if tiling == tilings[0] else "triton, other tiling"
            found.append((name, _named(tiling), functools.partial(_tensor_cores, tiling)))
        if tokens.batch * tokens.seq_len <= _MOST_SLOW_TOKENS:
            found.append(("triton float32", "", _float32))
    if tokens.batch * tokens.seq_len <= _MOST_SLOW_TOKENS:
        ways = [("reference", _reference), ("torch cdist", _cdist), ("torch baddbmm", _baddbmm)]
        found += [(name, "", _in_parts(way)) for name, way in ways]
        if tokens == _TUNED and not quick:
            found.append(("torch.compile", "", _compiled))
    return found


def _named(tiling: tuple[int | None, ...]) -> str:
    return "-".join(str(part) for part in tiling if part is not None)


def _tensor_cores(tiling: tuple[Any, ...], x: Tensor, books: Codebooks) -> Callable[[], object]:
    from wqlab.ops.cq_encode import triton_kernel

    own = triton_kernel.Tiling(*tiling)
    prepared = triton_kernel.prepare(books.entries, x.dtype, own.classes)
    return lambda: triton_kernel.encode_into(books.codes, x, prepared, own)


def _float32(x: Tensor, books: Codebooks) -> Callable[[], object]:
    from wqlab.ops.cq_encode import triton_kernel

    return lambda: triton_kernel.encode_plainly(books.codes, x, books.entries)


def _in_parts(way: Callable[[Tensor, Tensor], Tensor]) -> _Variant:
    """Return a variant that encodes some tokens at a time: `way` holds a distance to every entry."""

    def variant(x: Tensor, books: Codebooks) -> Callable[[], object]:
        def launch() -> None:
            for part in range(0, x.shape[2], _TOKENS_AT_ONCE):
                now = slice(part, part + _TOKENS_AT_ONCE)
                books.codes[:, :, now] = way(x[:, :, now], books.entries)

        return launch

    return variant


def _reference(x: Tensor, entries: Tensor) -> Tensor:
    from wqlab.ops.cq_encode import reference

    return reference.encode(x, entries)


def _grouped(x: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors [books, batch * seq, size] in float32 and entries [books, num_entries, size]."""
    batch, heads, seq, _ = x.shape
    _, groups, count, size = entries.shape
    vectors = x.reshape(batch, heads, seq, groups, size).permute(1, 3, 0, 2, 4).reshape(heads * groups, batch * seq, size)
    return vectors.float(), entries.reshape(heads * groups, count, size)


def _codes(found: Tensor, x: Tensor, entries: Tensor) -> Tensor:
    return found.reshape(*entries.shape[:2], x.shape[0], x.shape[2]).permute(2, 0, 3, 1)


def _cdist(x: Tensor, entries: Tensor) -> Tensor:
    import torch

    vectors, known = _grouped(x, entries)
    return _codes(torch.cdist(vectors, known).argmin(-1), x, entries)


def _baddbmm(x: Tensor, entries: Tensor) -> Tensor:
    import torch

    vectors, known = _grouped(x, entries)
    squares = known.square().sum(-1).unsqueeze(1)
    return _codes(torch.baddbmm(squares, vectors, known.transpose(1, 2), alpha=-2).argmin(-1), x, entries)


def _differences(x: Tensor, entries: Tensor) -> Tensor:
    vectors, known = _grouped(x, entries)
    return _codes((vectors[:, :, None] - known[:, None]).square().sum(-1).argmin(-1), x, entries)


def _compiled(x: Tensor, books: Codebooks) -> Callable[[], object]:
    import torch

    way = torch.compile(_differences, dynamic=False)
    return lambda: books.codes.copy_(way(x, books.entries))
