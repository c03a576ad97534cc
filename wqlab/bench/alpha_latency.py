"""Decode attention at the mixes of widths that the plan gives for each alpha (WindowQuant, Fig. 13a): what alpha costs in time.

The plans are those of the stem `alpha_sweep`: its committed table holds, per alpha, the share of windows in each width, mean over
layers and questions. What is timed is one layer of that mean mix.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqlab import paths
from wqlab.bench import Headline
from wqlab.bench.decode_caches import WINDOW_SIZE, Shape, Tokens, cache_bytes, random_cache, relative_error
from wqlab.bench.points import PointBench, Row, guarded, timed
from wqlab.errors import RecordError
from wqlab.profile.timing import rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch

#: LLaVA-OneVision-7B's heads over 100 frames of 256 tokens, eight videos at once.
SHAPE = Shape(8, 28, 4, 25600, 128)
QUICK = Shape(1, 2, 1, 640, 64)
#: Over the range of the figure's slider; the nearest ones of its table are taken.
ALPHAS = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0)
QUICK_ALPHAS = (0.5, 8.0)
SEED = 0
#: Rows of the figure's table -> its columns with the share of windows, and where the similarities come from.
_SOURCES = {"sweep": ("share", "video"), "prose": ("recorded_share", "prose")}


class Case(NamedTuple):
    """One alpha of one way to a plan."""

    similarity: str
    normalize: str
    alpha: float


class Point(NamedTuple):
    """A mix of widths, and all cases whose plans come to it."""

    shape: Shape
    tokens: Tokens
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        """Return the mix and its first case."""
        return f"{tuple(self.tokens)} tokens, alpha {self.cases[0].alpha:.3g}"


@register("bench", "alpha_latency")
class AlphaLatencyBench(PointBench):
    """Times of one layer's attention. Plans that come to the same windows are measured once, and have a row each."""

    name = "alpha_latency"
    description = "decode attention over the mixes of widths that the plan gives for each alpha (20 s, a GPU)"
    whole = ("windows_16", "windows_4", "windows_2", "bytes", "repeats", "copies")
    columns = {  # noqa: RUF012
        "similarity": "video: of PocketBench's videos to their questions, s_i of the pocket VLM; prose: recorded, of SmolLM2",
        "normalize": "how similarities reach the thresholds' range: none, minmax, rank",
        "alpha": "width of the INT4 band",
        "batch": "rows, one query token each",
        "num_heads": "query heads",
        "num_kv_heads": "heads of keys and values",
        "seq_len": "tokens of keys and values per row",
        "head_dim": "channels per head",
        "windows_16": "windows of 32 tokens of a row in 16 bits: the plan's mean share over layers and questions, rounded",
        "windows_4": "in 4 bits",
        "windows_2": "in 2 bits",
        "bits_per_element": "of keys and values, scales and minima included, bits",
        "bytes": "keys and values as they are stored",
        "latency_us": "median time of one layer's attention in a CUDA graph over rotated caches, us; empty where it failed",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph",
        "copies": "caches that the graph rotates through; together four times the L2 cache, or two",
        "rel_error": "norm of the difference to the float32 reference over the norm of it, two (row, KV head) pairs",
        "plans_sha256": "of figures/alpha_sweep.csv, which holds the plans' shares",
        "note": "what went wrong, else empty",
        "seed": "of the random caches",
        "provenance": "GPU, commit and day",
    }

    def points(self, quick: bool) -> list[Any]:
        """Return the distinct mixes, those of alpha 2 and the default similarities first."""
        shape, alphas = (QUICK, QUICK_ALPHAS) if quick else (SHAPE, ALPHAS)
        found: dict[Tokens, list[Case]] = {}
        for case, shares in _plans(alphas).items():
            found.setdefault(whole_windows(shares, shape.seq_len), []).append(case)
        points = [Point(shape, tokens, tuple(cases)) for tokens, cases in found.items()]
        return sorted(points, key=lambda point: min(map(_rank, point.cases)))

    def name_of(self, point: Point) -> Row:
        """Return the first case's columns; `rows` gives every case its own."""
        return self._named(point, point.cases[0])

    def rows(self, point: Point, device: torch.device, repeats: int) -> list[Row]:
        """Return one row per case of the mix, with the same times."""
        found = guarded({}, partial(_measure, point, device, repeats))
        return [{**self._named(point, case), **found} for case in point.cases]

    def _named(self, point: Point, case: Case) -> Row:
        windows = dict(zip(("windows_16", "windows_4", "windows_2"), (n // WINDOW_SIZE for n in point.tokens), strict=True))
        size = cache_bytes(point.shape, point.tokens).total
        return {
            **case._asdict(), **point.shape._asdict(), **windows, "bits_per_element": 4 * size / point.shape.elements,
            "bytes": size, "plans_sha256": _sha256(), "seed": SEED,
        }  # fmt: skip

    def finish(self, data: pd.DataFrame) -> pd.DataFrame:
        """Sort by source, normalization and alpha."""
        return data.sort_values(["similarity", "normalize", "alpha"], ignore_index=True)

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the slowest alpha's latency over the fastest one's, for the figure's default plans."""
        times = data.loc[(data["similarity"] == "video") & (data["normalize"] == "minmax"), "latency_us"].dropna()
        if times.empty:
            return []
        return [
            Headline("attention, slowest to fastest alpha", float(times.max() / times.min()), None, "ratio", "fig13a-alpha-latency")
        ]


def whole_windows(shares: tuple[float, float, float], seq_len: int) -> Tokens:
    """Return the tokens in 16, 4 and 2 bits for shares of the windows: rounded, those of 2 bits take what that leaves."""
    windows = seq_len // WINDOW_SIZE
    dense = round(shares[0] * windows)
    four = min(round(shares[1] * windows), windows - dense)
    return Tokens(*(WINDOW_SIZE * n for n in (dense, four, windows - dense - four)))


def _rank(case: Case) -> tuple[bool, bool, float]:
    return case.similarity != "video", case.normalize != "minmax", abs(np.log(case.alpha / 2))


def _measure(point: Point, device: torch.device, repeats: int) -> Row:
    import torch

    from wqlab.ops.mixed_decode import cuda_kernel, mixed_decode

    shape, generator = point.shape, torch.Generator(device).manual_seed(SEED)
    copies = rotation(cache_bytes(shape, point.tokens).total, device)
    caches = [random_cache(shape, point.tokens, generator) for _ in range(copies)]
    query = (2 * torch.randn(shape.batch, shape.num_heads, 1, shape.head_dim, device=device, generator=generator)).half()
    if device.type == "cuda":
        ready = [cuda_kernel.prepared(query, cache, shape.head_dim**-0.5) for cache in caches]
        for one in ready:
            one.call.output.fill_(torch.nan)
        launches = [one.launch for one in ready]
    else:
        launches = [partial(mixed_decode, query, cache, backend="reference") for cache in caches]
    return timed(launches, device, repeats, lambda output: relative_error(output, query, caches[0]))


def _sha256() -> str:
    from wqlab import records

    return records.sha256_file(_table())


def _table() -> Any:
    return paths.shipped("figures") / "alpha_sweep.csv"


def _plans(alphas: tuple[float, ...]) -> dict[Case, tuple[float, float, float]]:
    """Return the share of windows in 16, 4 and 2 bits for the cases of the committed figure nearest to these alphas.

    Raises
    ------
    RecordError
        When the figure is missing, or was not made with its defaults.
    """
    import pandas as pd

    table, again = _table(), "run wqlab reproduce alpha_sweep"
    try:
        made = json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))["parameters"]
        data = pd.read_csv(table, usecols=["part", "normalize", "alpha", "bits", *(name for name, _ in _SOURCES.values())])
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"figures/alpha_sweep.csv, which holds the plans, cannot be read ({error}): {again}") from error
    if made["similarity"] != "video" or made["quick"]:
        raise RecordError(f"figures/alpha_sweep.csv was made with similarity = {made['similarity']!r}, not the default: {again}")
    known = np.sort(data["alpha"].dropna().unique())
    nearest = {float(known[np.abs(np.log(known / alpha)).argmin()]) for alpha in alphas}
    plans = {}
    for part, (column, similarity) in _SOURCES.items():
        shares = data[(data["part"] == part) & data["alpha"].isin(nearest)]
        for (normalize, _), mix in shares.groupby(["normalize", "alpha"]):
            by_bits = dict(zip(mix["bits"], mix[column], strict=True))
            plans[Case(similarity, str(normalize), float(mix["alpha"].iloc[0]))] = by_bits[16], by_bits[4], by_bits[2]
    return plans
