"""What encoding one layer's prompt costs: quantize, reorder and pack in one pass, against plain torch and the read bandwidth.

The windows of each width lie anywhere among the tokens, as a plan chooses them. Values are random, and the tokens of a graph fill
four times the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab import progress
from wqlab.bench import Bench, Headline
from wqlab.bench.decode_caches import WINDOW_SIZE, split_tokens
from wqlab.errors import MissingPartError, WqlabError
from wqlab.profile.timing import Timing, launch_times, read_bandwidth, rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor


class Prompt(NamedTuple):
    """Keys and values of one layer."""

    batch: int
    num_kv_heads: int
    seq_len: int
    head_dim: int


#: LLaVA-OneVision-7B's heads over 100 frames of 256 tokens, many short videos, and a long prompt over eight heads.
PROMPTS = (Prompt(8, 4, 25600, 128), Prompt(60, 4, 1280, 128), Prompt(8, 8, 32768, 128))
QUICK = (Prompt(2, 2, 320, 64),)
MIXES = ("int4", "int2", "10/30/60")
SEED = 0
#: torch.compile takes half a minute for each width and shape.
_COMPILED = ((PROMPTS[0], "int4"),)


def torch_encode(key: Tensor, value: Tensor, positions: Tensor, num_bits: int, window_size: int = WINDOW_SIZE) -> list[Tensor]:
    """Return codes (packed row by row), scale and minimum of keys, then of values, in torch's own operations.

    Parameters
    ----------
    key, value, positions, num_bits, window_size
        As of `wqlab.ops.mixed_decode.encoder.encode_windows`. The scale is rounded to nearest, which is a little less work.
    """
    import torch

    levels, per_byte = 2**num_bits - 1, 8 // num_bits
    columns = positions.long()[:, None, :, None]
    parts = []
    for x in (key, value):
        batch, heads, _, head_dim = x.shape
        chosen = x.gather(2, columns.expand(-1, heads, -1, head_dim))
        grouped = chosen.reshape(batch, heads, -1, window_size, head_dim)
        low, high = grouped.aminmax(dim=3, keepdim=True)
        scale = ((high.float() - low.float()) / levels).half()
        divisor = torch.where(scale == 0, 1, scale).float()
        codes = ((grouped.float() - low.float()) / divisor).round().clamp(0, levels).to(torch.uint8).reshape(chosen.shape)
        packed = codes[..., ::per_byte].clone()
        for place in range(1, per_byte):
            packed |= codes[..., place::per_byte] << (place * num_bits)
        parts += [packed, scale.squeeze(3), low.squeeze(3)]
    return parts


def traffic(prompt: Prompt, mix: str) -> tuple[int, int]:
    """Return the bytes that must be read (tokens that are encoded, and where they lie) and written (codes and metadata)."""
    tokens = split_tokens(prompt.seq_len, mix)
    encoded = tokens.four + tokens.two
    row = 2 * prompt.batch * prompt.num_kv_heads * prompt.head_dim  # one token's elements, keys and values
    codes = row * tokens.four // 2 + row * tokens.two // 4
    return 2 * row * encoded + 4 * prompt.batch * encoded, codes + 4 * row * encoded // WINDOW_SIZE


@register("bench", "encode_windows")
class EncodeWindowsBench(Bench):
    """The kernel needs a CUDA device. A quick run on a CPU shows the table with the reference's times, which mean nothing."""

    name = "encode_windows"
    description = "quantize, reorder and pack one layer's prompt against plain torch and the read bandwidth (1 min, a GPU)"
    columns = {  # noqa: RUF012
        "batch": "rows",
        "num_kv_heads": "heads of keys and values",
        "seq_len": "tokens per row",
        "head_dim": "channels per head",
        "mix": "int4, int2: all windows of 32 tokens; 10/30/60: the 30 % in 4 bits and the 60 % in 2 bits, a launch each; what "
        "stays in 16 bits is not touched",
        "backend": "of encode_windows: cuda; reference in quick runs without a GPU",
        "latency_us": "median time for the layer in a CUDA graph over rotated tokens, us; without the check for NaN on the host",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph",
        "copies": "prompts that the graph rotates through; together four times the L2 cache, or two",
        "bytes_read": "of keys and values that are encoded, and of their positions",
        "bytes_written": "codes and metadata",
        "read_bandwidth_tb_s": "best observed rate of a sum over 2 GiB in this run, TB/s",
        "read_fraction": "bytes_read over latency_us, over the read bandwidth; 1 is the floor of reading alone",
        "traffic_fraction": "the same for bytes_read and bytes_written together",
        "torch_us": "the same work in torch's own operations, in a CUDA graph over the same tokens, us",
        "compiled_us": "the same under torch.compile, us; first shape and int4 only",
        "baseline": "the faster of the two",
        "baseline_us": "its time, us",
        "ratio": "baseline_us / latency_us",
        "equal": "whether the first row's codes and metadata are the quantizer's, to the bit",
        "note": "what went wrong, else empty",
        "seed": "of tokens and positions",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per shape and mix.

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
                "encode_windows is measured on a CUDA device, and torch finds none; --quick shows the table without"
            )
        size = (16 << 20) if quick else (2 << 30)
        bandwidth = read_bandwidth(device, size)
        prompts = QUICK if quick else PROMPTS
        rows = []
        for i, prompt in enumerate(prompts):
            for mix in MIXES:
                progress.report(f"{tuple(prompt)}, {mix}", i, len(prompts))
                rows.append(self._row(prompt, mix, device, quick))
            # Whatever else the machine did a while ago may be over: the best rate so far is the floor's.
            bandwidth = max(bandwidth, read_bandwidth(device, size))
        data = pd.DataFrame(rows)
        for name, amount in (("read", data["bytes_read"]), ("traffic", data["bytes_read"] + data["bytes_written"])):
            data[f"{name}_fraction"] = amount / data["latency_us"] * 1e6 / bandwidth
        data["read_bandwidth_tb_s"] = bandwidth / 1e12
        times = data[["torch_us", "compiled_us"]]
        data["baseline_us"] = times.min(axis=1)
        known = times.notna().any(axis=1)
        names = {"torch_us": "torch", "compiled_us": "torch.compile"}
        data["baseline"] = times.fillna(math.inf).idxmin(axis=1).map(names).where(known, "")
        data["ratio"] = data["baseline_us"] / data["latency_us"]
        return data[list(self.columns)].astype({"repeats": "Int64", "copies": "Int64", "equal": "boolean"})

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the time of one layer at every shape, at the mix of a plan."""
        rows = data[data["mix"] == "10/30/60"].to_dict("records")
        return [
            Headline(
                f"encode a layer of {row['batch']} x {row['seq_len']:,} tokens, {row['num_kv_heads']} heads, 10/30/60",
                row["latency_us"], row["baseline_us"], "us",
            )
            for row in rows
        ]  # fmt: skip

    @staticmethod
    def _row(prompt: Prompt, mix: str, device: torch.device, quick: bool) -> dict[str, Any]:
        from wqlab.bench.mixed_decode import _new_memory

        _new_memory(device)
        read, written = traffic(prompt, mix)
        row: dict[str, Any] = {
            **prompt._asdict(), "mix": mix, "backend": "cuda" if device.type == "cuda" else "reference", "latency_us": math.nan,
            "p10_us": math.nan, "p90_us": math.nan, "repeats": None, "copies": None, "bytes_read": read, "bytes_written": written,
            "torch_us": math.nan, "compiled_us": math.nan, "equal": None, "note": "", "seed": SEED,
        }  # fmt: skip
        notes = []
        case = _Case(prompt, mix, device)
        try:
            found = case.ours(3 if quick else 50)
            row |= {"equal": case.equal, "repeats": found.repeats, "copies": len(case.tokens)}
            if case.equal:
                row |= {"latency_us": found.median_us, "p10_us": found.p10_us, "p90_us": found.p90_us}
            else:  # what computes something else has no speed
                notes.append(f"codes or metadata are wrong, after {found.median_us:.1f} us")
        except (WqlabError, RuntimeError) as failed:
            notes.append(" ".join(str(failed).split())[:300])
        for name, compiled in (("torch_us", False), ("compiled_us", True)):
            if compiled and (device.type == "cpu" or (prompt, mix) not in _COMPILED):
                continue
            try:
                row[name] = case.plain(1 if quick else 5, compiled).median_us
            except Exception as failed:  # a compiler's errors are many, and the other times do not need it
                notes.append(f"{name}: {type(failed).__name__}: {' '.join(str(failed).split())}"[:300])
        return {**row, "note": "; ".join(notes)}


class _Case:
    """The tokens of a shape, where the windows of each width lie, and what encodes them."""

    def __init__(self, prompt: Prompt, mix: str, device: torch.device) -> None:
        import torch

        generator = torch.Generator(device).manual_seed(SEED)
        self.device, self.equal = device, False
        size = tuple(prompt)
        copies = rotation(traffic(prompt, mix)[0], device)
        self.tokens = [
            [torch.randn(size, device=device, generator=generator, dtype=torch.float16) for _ in range(2)] for _ in range(copies)
        ]
        split = split_tokens(prompt.seq_len, mix)
        windows = torch.rand((prompt.batch, prompt.seq_len // WINDOW_SIZE), device=device, generator=generator).argsort(1)
        columns = (windows[:, :, None] * WINDOW_SIZE + torch.arange(WINDOW_SIZE, device=device)).flatten(1).int()
        first, self.positions = split.dense, []
        for bits, count in ((4, split.four), (2, split.two)):
            if count:
                self.positions.append((bits, columns[:, first : first + count].contiguous()))
            first += count

    def ours(self, repeats: int) -> Timing:
        """Return the time of our encoder; `equal` then says whether the first row is right."""
        import torch

        from wqlab.ops.mixed_decode.encoder import encode_windows

        parts = [[self._launch(key, value, positions, bits) for bits, positions in self.positions] for key, value in self.tokens]
        launches = [_one_after_another([launch for launch, _ in widths]) for widths in parts]
        found = launch_times(launches, self.device, repeats)
        self.equal = True
        key, value = (x[:1] for x in self.tokens[0])
        for (bits, positions), (_, result) in zip(self.positions, parts[0], strict=True):
            want, got = encode_windows(key, value, positions[:1], bits, backend="reference"), result()
            self.equal &= torch.equal(got.codes[:1], want.codes) and bool((got.meta[:1] == want.meta).all())
        return found

    def _launch(self, key: Tensor, value: Tensor, positions: Tensor, bits: int) -> tuple[Callable[[], object], Callable[[], Any]]:
        """Return a launch that only queues work, and what gives its result."""
        import torch

        from wqlab.ops.mixed_decode import encoder

        if self.device.type == "cpu":
            return (lambda: encoder.encode_windows(key, value, positions, bits)), (
                lambda: encoder.encode_windows(key, value, positions, bits)
            )
        call = encoder.prepare(key, value, positions, bits, WINDOW_SIZE)
        call.segment.codes.fill_(0xFF)
        call.segment.meta.fill_(math.nan)
        major, minor = torch.cuda.get_device_capability(self.device)
        kernel = encoder._kernel(key.shape[3], bits, WINDOW_SIZE, f"sm_{major}{minor}", self.device)

        def launch() -> None:
            kernel.launch(None, call.grid, (encoder._THREADS,), call.shared_bytes, call.arguments)

        def result() -> Any:
            encoder.raise_if_spoiled(call.spoiled)
            return call.segment

        return launch, result

    def plain(self, repeats: int, compiled: bool) -> Timing:
        """Return the time of torch's own operations, compiled or as they are."""
        import torch

        encode = torch.compile(torch_encode, dynamic=False) if compiled else torch_encode

        def all_widths(key: Tensor, value: Tensor) -> Callable[[], object]:
            return lambda: [encode(key, value, positions, bits) for bits, positions in self.positions]

        return launch_times([all_widths(key, value) for key, value in self.tokens], self.device, repeats, warmup=1)


def _one_after_another(launches: list[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [launch() for launch in launches]
