"""How far `mixed_decode` is from float64, over thousands of random calls on a GPU; and whether it repeats to the bit.

Everything, the truth too, is computed on the device, so that 2,000 cases take seconds. Outputs and workspaces hold NaN before a
launch, and buffers hold NaN wherever no row has a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from wqlab import progress
from wqlab.bench import Bench, Headline, decode_cases
from wqlab.bench.decode_cases import ALIKE, Built, DecodeCase
from wqlab.errors import LimitError, MissingPartError
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

#: ||output - truth|| / ||truth|| at most.
LIMITS = {"float16": 2e-3, "bfloat16": 1e-2}
CUDA_CASES, TRITON_CASES, QUICK_CASES = 2000, 300, 12
#: After so many cases that cannot run at all something is wrong with the device, and the rest would only repeat it.
_MOST_FAILURES = 10


@register("bench", "mixed_decode_errors")
class MixedDecodeErrorsBench(Bench):
    """float16 through the CUDA kernel, bfloat16 through Triton, which serves it. The record is written whatever it shows."""

    name = "mixed_decode_errors"
    description = "error of mixed_decode against float64 over 2,000 random cases, and repeats to the bit (1 min, a GPU)"
    columns = {  # noqa: RUF012
        "seed": "of the case; wqlab.bench.decode_cases makes it again",
        "dtype": "of query, dense tokens and metadata",
        "backend": "of mixed_decode, by name; reference in quick runs without a GPU",
        "batch": "rows",
        "kv_heads": "heads of keys and values",
        "group": "query heads per KV head",
        "q_len": "query tokens, causal among themselves",
        "head_dim": "channels per head",
        "window_size": "tokens per window of one scale and minimum per channel",
        "int4_tokens": "held in 4 bits",
        "int2_tokens": "held in 2 bits",
        "dense_tokens": "held in 16 bits",
        "dense_as": "where they lie: tail or segment; empty without any",
        "lengths": "whether rows are ragged",
        "zero_rows": "rows without any token",
        "mask": "whether three of ten tokens are masked",
        "offset": "of one channel of the keys from zero",
        "rel_error": "norm of the difference to float64 over the norm of it; infinite for NaN, and where a row without tokens is "
        "not 0",
        "rel_error_unrounded": "the same against codes decoded in float64; rel_error is that for cuda, and for the other backends "
        "it is the error against what they decode to: the same rounded to the dtype of the metadata",
        "limit": "of rel_error",
        "bit_identical": "whether two launches into fresh NaN and one through mixed_decode gave the same bits",
        "note": "what went wrong, else empty",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per case.

        Raises
        ------
        MissingPartError
            Without a CUDA device, unless the run is a quick one.
        """
        import pandas as pd
        import torch

        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        if not on_gpu and not quick:
            raise MissingPartError(
                "mixed_decode_errors runs the kernels on a CUDA device, and torch finds none; --quick runs the reference"
            )
        rows: list[dict[str, Any]] = []
        failures = 0
        cases = list(_cases(quick, on_gpu))
        for i, (case, backend) in enumerate(cases):
            progress.report(f"{case.dtype}, {backend}", i, len(cases))
            rows.append(self._row(case, backend, device))
            failures += math.isnan(rows[-1]["rel_error"])
            if failures == _MOST_FAILURES:
                rows[-1]["note"] += f"; {len(cases) - len(rows)} further cases were not tried"
                break
        return pd.DataFrame(rows)[list(self.columns)]

    def check(self, data: pd.DataFrame) -> None:
        """Raise LimitError, with the seeds, when a case is outside its limit, does not repeat or could not run."""
        bad = data[~(data["rel_error"] <= data["limit"]) | ~data["bit_identical"]]
        if bad.empty:
            return
        told = []
        for (dtype, backend), part in bad.groupby(["dtype", "backend"], sort=False):
            seeds = ", ".join(map(str, part["seed"].head(20))) + (", ..." if len(part) > 20 else "")
            notes = f", {part['note'].iloc[0]}" if part["note"].iloc[0] else ""
            told.append(
                f"{len(part)} in {dtype} on {backend} (rel_error up to {part['rel_error'].max():.3g}, limit "
                f"{part['limit'].iloc[0]:g}; {int((~part['bit_identical']).sum())} do not repeat{notes}): seeds {seeds}"
            )
        raise LimitError(f"{self.name}: {len(bad)} of {len(data)} cases are wrong: {'; '.join(told)}")

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the largest error of each dtype and backend."""
        parts = data.groupby(["dtype", "backend"], sort=False)["rel_error"]
        return [
            Headline(f"largest error of {len(part)} random cases, {dtype} on {backend}", float(part.max()), None, "relative")
            for (dtype, backend), part in parts
        ]

    @staticmethod
    def _row(case: DecodeCase, backend: str, device: torch.device) -> dict[str, Any]:
        row: dict[str, Any] = {name: getattr(case, name) for name in MixedDecodeErrorsBench.columns if hasattr(case, name)}
        row |= {
            "lengths": bool(case.lengths), "zero_rows": sum(held == (0, 0, 0) for held in case.rows), "backend": backend,
            "limit": LIMITS[case.dtype], "rel_error": math.nan, "rel_error_unrounded": math.nan, "bit_identical": False, "note": "",
        }  # fmt: skip
        try:
            built = decode_cases.build(case, device, rounded_too=backend != "cuda")
            outputs = _outputs(built, backend)
            exact = decode_cases.relative_error(outputs[0], built.truth)
            error = exact if backend == "cuda" else decode_cases.relative_error(outputs[0], built.truth_rounded)
            same = all(_same_bits(output, outputs[0]) for output in outputs)
        except Exception as failed:  # a compiler's errors are many; `check` names the case, and the others go on
            return {**row, "note": f"{type(failed).__name__}: {' '.join(str(failed).split())}"[:300]}
        if device.type == "cpu":
            row["note"] = "no GPU: the reference in float32, not a kernel"
        return {**row, "rel_error": error, "rel_error_unrounded": exact, "bit_identical": same}


def _cases(quick: bool, on_gpu: bool) -> Iterator[tuple[DecodeCase, str]]:
    for seed in range(QUICK_CASES if quick else CUDA_CASES):
        yield decode_cases.draw(seed, 4096 if on_gpu else 512), "cuda" if on_gpu else "reference"
    for seed in range(QUICK_CASES // 4 if quick else TRITON_CASES):
        # Kind by kind, so that all cases of a kind find its kernel compiled.
        kind = seed * len(ALIKE) // (QUICK_CASES // 4 if quick else TRITON_CASES)
        yield decode_cases.draw_alike(seed, kind, 4096 if on_gpu else 512), "triton" if on_gpu else "reference"


def _outputs(built: Built, backend: str) -> list[Tensor]:
    """Return what several launches give, each into NaN."""
    from wqlab.ops.mixed_decode import mixed_decode

    def call() -> Tensor:
        return mixed_decode(built.query, built.cache, backend=backend)  # type: ignore[arg-type]

    calls: list[Callable[[], Tensor]] = [call, call]
    if backend == "cuda":
        calls.insert(0, _prepared(built))
    with decode_cases.poisoned():
        return [launch() for launch in calls]


def _prepared(built: Built) -> Callable[[], Tensor]:
    """Return a launch that is repeated as a serving loop repeats it, into an output and a workspace that hold NaN each time."""
    import torch

    from wqlab.ops.mixed_decode import cuda_kernel

    ready = cuda_kernel.prepared(built.query, built.cache, built.query.shape[-1] ** -0.5)

    def launch() -> Tensor:
        results = []
        for _ in range(2):
            for tensor in ready.call.kept:
                if tensor.dtype == torch.float32:
                    tensor.fill_(math.nan)
            ready.call.output.fill_(math.nan)
            results.append(ready.launch().clone())
        # Two of one launch that differ must not pass for one.
        return results[0] if _same_bits(*results) else torch.full_like(results[0], math.nan)

    return launch


def _same_bits(a: Tensor, b: Tensor) -> bool:
    import torch

    return torch.equal(a.view(torch.int16), b.view(torch.int16))
