"""Fused against unfused decode attention over packed windows (WindowQuant, Table 9): what decoding into memory first costs.

Unfused is tuned as fused is: one launch of a kernel of this project decodes all widths near the rate of memory, and the fastest of
torch's SDPA backends reads the result. All layers of a model would share one workspace for it (else nothing would be saved), so
all copies of a cache do here, and a workspace that fits the L2 cache stays there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab.bench import Headline
from wqlab.bench.decode_caches import Shape, cache_bytes, random_cache, relative_error, split_tokens
from wqlab.bench.points import PointBench, Row, fresh_memory, guarded, timed
from wqlab.profile.timing import launch_times, rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from wqlab.ops.mixed_decode import MixedKV, PackedTensor

#: The paper's Table 9 (batch 20, 5 frames of 256 tokens), a long video, and the batch of its Table 8.
SHAPES = (Shape(20, 28, 4, 1280, 128), Shape(8, 28, 4, 25600, 128), Shape(60, 28, 4, 1280, 128))
QUICK = (Shape(1, 4, 2, 320, 64),)
MIXES = ("10/30/60", "int4", "int2")
SEED = 0
_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
#: Plain torch takes milliseconds; a tenth of the replays is enough for it.
_SLOW = 10

FUSED, SDPA, IN_PLACE = "fused", "decode kernel, SDPA", "decode kernel, SDPA, 16-bit windows in place"
MATMUL, PLAIN = "decode kernel, matmul, softmax, matmul", "torch operators, matmul, softmax, matmul"
#: In the order of the table; the last two are what the paper describes as unfused.
ARRANGEMENTS = (FUSED, SDPA, IN_PLACE, MATMUL, PLAIN)

Attend = Callable[[], "Tensor"]


class Point(NamedTuple):
    """A decode step, and how its windows are mixed."""

    shape: Shape
    mix: str

    def __str__(self) -> str:
        """Return both in a few words."""
        return f"{tuple(self.shape)} {self.mix}"


@register("bench", "operator_fusion")
class OperatorFusionBench(PointBench):
    """Times of one layer's attention, fused and unfused."""

    name = "operator_fusion"
    description = "decode attention with windows decoded on the fly against decoded into memory first (40 s, a GPU)"
    whole = ("repeats", "copies", "bytes", "decoded_bytes")
    columns = {  # noqa: RUF012
        "batch": "rows, one query token each",
        "num_heads": "query heads",
        "num_kv_heads": "heads of keys and values",
        "seq_len": "tokens of keys and values per row",
        "head_dim": "channels per head",
        "mix": "int4, int2, or 10/30/60: percent of the windows of 32 tokens in 16, 4, 2 bits (granularity window_channel)",
        "arrangement": "; ".join(
            (
                f"{FUSED}: mixed_decode, one kernel",
                f"{SDPA}: one kernel decodes all widths and copies windows of 16 bits, then torch's fastest SDPA backend",
                f"{IN_PLACE}: the same, those of 16 bits lie in the workspace already",
                f"{MATMUL}: after the same kernel, with softmax in float32",
                f"{PLAIN}: windows packed row by row, decoded by torch",
            )
        ),
        "latency_us": "median time of the whole in a CUDA graph over rotated caches, us; empty where it failed, see note",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph",
        "copies": "caches that the graph rotates through; together four times the L2 cache, or two; all share one workspace",
        "decode_us": "decoding alone, likewise, us; empty where nothing is decoded into memory",
        "decoded_bytes": "read and written by decoding",
        "attention_us": "attention over the workspace alone, us",
        "attention": "the SDPA backend that was the fastest, and how heads that share a KV head were given to it",
        "rel_error": "norm of the difference to the float32 reference over the norm of it, two (row, KV head) pairs",
        "bytes": "read and written at least, scores of matmul included; empty for torch operators, which make more copies",
        "fused_us": "latency_us of fused at the same shape and mix, us",
        "ratio": "latency_us / fused_us; above 1 fused is faster",
        "note": "what went wrong, else empty",
        "seed": "of the random caches",
        "provenance": "GPU, commit and day",
    }

    def points(self, quick: bool) -> list[Any]:
        """Return shapes times mixes."""
        return [Point(shape, mix) for shape in (QUICK if quick else SHAPES) for mix in MIXES]

    def name_of(self, point: Point) -> Row:
        """Return shape, mix and seed."""
        return {**point.shape._asdict(), "mix": point.mix, "seed": SEED}

    def rows(self, point: Point, device: torch.device, repeats: int) -> list[Row]:
        """Return one row per arrangement."""
        case, rows = _Case(point, device, repeats), []
        for arrangement in ARRANGEMENTS:
            if arrangement == IN_PLACE and not split_tokens(point.shape.seq_len, point.mix).dense:
                continue
            if arrangement == PLAIN:
                case.release()
            rows.append(guarded({**self.name_of(point), "arrangement": arrangement}, partial(case.measure, arrangement)))
        return rows

    def finish(self, data: pd.DataFrame) -> pd.DataFrame:
        """Add the ratio to the fused kernel."""
        keys = [*Shape._fields, "mix"]
        fused = data[data["arrangement"] == FUSED].set_index(keys)["latency_us"]
        data["fused_us"] = [float(fused.get(tuple(row), float("nan"))) for row in data[keys].itertuples(index=False)]
        data["ratio"] = data["latency_us"] / data["fused_us"]
        return data

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the tuned unfused step against the fused one, at the shapes and the mix 10/30/60."""
        found = []
        rows = data[(data["arrangement"] == SDPA) & (data["mix"] == MIXES[0]) & data["ratio"].notna()]
        for row in rows.itertuples():
            claim = "table9-attention" if (row.batch, row.seq_len) == (SHAPES[0].batch, SHAPES[0].seq_len) else None
            name = f"unfused to fused attention, {row.batch} x {row.seq_len:,} tokens, {row.mix}"
            found.append(Headline(name, float(str(row.ratio)), None, "ratio", claim))
        return found


class _Case:
    """The caches of a point and one workspace."""

    def __init__(self, point: Point, device: torch.device, repeats: int) -> None:
        import torch

        self.shape, self.mix, self.device, self.repeats = point.shape, point.mix, device, repeats
        self.generator = torch.Generator(device).manual_seed(SEED)
        self.size = cache_bytes(self.shape, self.mix)
        self.copies = rotation(self.size.total, device)
        size = (self.shape.batch, self.shape.num_heads, 1, self.shape.head_dim)
        self.query = (2 * torch.randn(size, device=device, generator=self.generator)).half()
        self.caches: list[MixedKV] = [random_cache(self.shape, self.mix, self.generator) for _ in range(self.copies)]
        self.key, self.value = (
            torch.empty(size[0], self.shape.num_kv_heads, self.shape.seq_len, size[3], dtype=torch.float16, device=device)
            for _ in range(2)
        )

    def release(self) -> None:
        """Give the caches back; those of plain torch are packed otherwise."""
        self.caches = []
        fresh_memory(self.device)

    def measure(self, arrangement: str) -> Row:
        """Return the columns of an arrangement."""
        if arrangement == FUSED:
            return {**self._timed(self._fused(), self.caches[0]), "bytes": self.size.total}
        if arrangement == PLAIN:
            return self._plain()
        in_place = arrangement == IN_PLACE
        decodes = self._decodes(copy_dense=not in_place)
        self._poison(in_place)
        decodes[0]()
        name, attend = ("", self._matmul) if arrangement == MATMUL else self._fastest_sdpa()

        def both(decode: Callable[[], None]) -> Tensor:
            decode()
            return attend()

        self._poison(in_place)
        found = self._timed([partial(both, decode) for decode in decodes], self.caches[0])
        decoded = self.size.total + self.shape.fp16_bytes - (2 * self.size.dense if in_place else 0)
        scores = 8 * self.shape.batch * self.shape.num_heads * self.shape.seq_len if arrangement == MATMUL else 0
        return {
            **found,
            "decode_us": launch_times(decodes, self.device, self.repeats).median_us,
            "attention_us": launch_times([attend], self.device, self.repeats).median_us,
            "attention": name,
            "decoded_bytes": decoded,
            "bytes": decoded + self.shape.fp16_bytes + scores,
        }

    def _timed(self, launches: list[Attend], first: MixedKV, slower: int = 1) -> Row:
        repeats = max(self.repeats // slower, 1)
        return timed(launches, self.device, repeats, lambda output: relative_error(self._heads(output), self.query, first))

    def _heads(self, output: Tensor) -> Tensor:
        return output.reshape(self.query.shape)

    def _fused(self) -> list[Attend]:
        import torch

        from wqlab.ops.mixed_decode import cuda_kernel, mixed_decode

        if self.device.type != "cuda":
            return [partial(mixed_decode, self.query, cache, backend="reference") for cache in self.caches]
        ready = [cuda_kernel.prepared(self.query, cache, self.shape.head_dim**-0.5) for cache in self.caches]
        for one in ready:
            one.call.output.fill_(torch.nan)
        return [one.launch for one in ready]

    def _decodes(self, copy_dense: bool) -> list[Callable[[], None]]:
        from wqlab.ops.mixed_decode import dequantizer

        if self.device.type != "cuda":
            return [partial(dequantizer.decode_into, cache, self.key, self.value, copy_dense) for cache in self.caches]
        return [dequantizer.prepared(cache, self.key, self.value, copy_dense).launch for cache in self.caches]

    def _poison(self, in_place: bool) -> None:
        """Fill the workspace with NaN, but for windows that lie in it already: those of the first cache."""
        import torch

        for out, side in ((self.key, "key"), (self.value, "value")):
            out.fill_(torch.nan)
            if in_place:
                dense = getattr(self.caches[0].segments[0], side)
                out[:, :, : dense.shape[2]] = dense

    def _fastest_sdpa(self) -> tuple[str, Attend]:
        """Return the fastest backend over the workspace: heads as they are, or those of a group as query tokens."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def call(backend: str, query: Tensor, grouped: bool) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a refused backend warns once for each of its reasons
                return scaled_dot_product_attention(query, self.key, self.value, enable_gqa=grouped)

        group = self.shape.group
        folded = self.query.view(self.shape.batch, self.shape.num_kv_heads, group, self.shape.head_dim)
        ways = [("heads", self.query, group > 1)] + ([("group as tokens", folded, False)] if group > 1 else [])
        best: tuple[float, str, Attend] | None = None
        for backend in _BACKENDS:
            for way, query, grouped in ways:
                launch = partial(call, backend, query, grouped)
                try:
                    error = relative_error(self._heads(launch()), self.query, self.caches[0])
                    time = launch_times([launch], self.device, max(self.repeats // 10, 1), warmup=1).median_us
                except RuntimeError:  # this backend does not take the shape
                    continue
                if error <= 1e-2 and (best is None or time < best[0]):
                    best = time, f"{backend.lower()}, {way}", launch
        if best is None:
            raise RuntimeError(f"no SDPA backend of torch {torch.__version__} serves {tuple(self.shape)}")
        return best[1], best[2]

    def _matmul(self) -> Tensor:
        return self._attend_by_matmul(self.key, self.value)

    def _attend_by_matmul(self, key: Tensor, value: Tensor) -> Tensor:
        import torch

        grouped = self.query.view(self.shape.batch, self.shape.num_kv_heads, self.shape.group, self.shape.head_dim)
        scores = torch.matmul(grouped * self.shape.head_dim**-0.5, key.transpose(-1, -2))
        return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(scores.dtype), value)

    def _plain(self) -> Row:
        caches = [random_cache(self.shape, self.mix, self.generator, fragments=False) for _ in range(self.copies)]

        def attend(cache: MixedKV) -> Tensor:
            decode_by_operators(cache, self.key, self.value)
            return self._matmul()

        return self._timed([partial(attend, cache) for cache in caches], caches[0], _SLOW)


def decode_by_operators(cache: MixedKV, key: Tensor, value: Tensor) -> None:
    """Decode windows that are packed row by row with operators of torch, in half precision, as an unfused model would."""
    import torch

    first = 0
    for segment in cache.segments:
        for side, out in ((segment.key, key), (segment.value, value)):
            into = out[:, :, first : first + segment.tokens]
            into.copy_(side if isinstance(side, torch.Tensor) else _decoded(side))
        first += segment.tokens


def _decoded(side: PackedTensor) -> Tensor:
    from wqlab.layouts import bitpack

    batch, heads, tokens, dim = side.shape
    windows = (batch, heads, tokens // side.window_size, side.window_size, dim)
    codes = bitpack.unpack(side.codes, side.num_bits, dim).half().reshape(windows)
    return (codes * side.scale.unsqueeze(3)).add_(side.minimum.unsqueeze(3)).reshape(side.shape)
