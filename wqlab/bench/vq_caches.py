"""Accuracy against bits with each kind of cache, vectors and elements, on prose and on PocketBench."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wqlab import progress
from wqlab.bench import Bench
from wqlab.bench.vq_ways import (
    ABOUT_FULL,
    CACHES,
    COLUMNS,
    FULL,
    ON_CPU,
    ON_GPU,
    QUICK,
    SPLITS,
    CacheWay,
    Pocket,
    Prose,
    answers,
    known,
    nll,
    nll_rows,
    setting,
)
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd


@register("bench", "vq_caches")
class VQCachesBench(Bench):
    """Writes what `vq_quality` reads of caches."""

    name = "vq_caches"
    description = "perplexity and PocketBench with CQ, KIVI, QoQ and RTN caches (5 min on an H200; prose alone without, an hour)"
    columns = COLUMNS

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per setting, exam and metric."""
        import pandas as pd

        from wqlab.evals.scoring import find_device

        device = find_device()
        size = QUICK if quick else ON_GPU if device.type == "cuda" else ON_CPU
        caches = (CacheWay("rtn", 4), CacheWay("cq", 2, rotary="before")) if quick else CACHES
        rows = [*_on_prose(Prose.load(device, size), caches)]
        if size.questions:
            # Codebooks of thousands of groups take minutes without a GPU: a quick run learns those of the short prose alone.
            rows += _on_pocketbench(Pocket.load(device, size), caches[:1] if quick else caches)
        return pd.DataFrame(rows, columns=list(COLUMNS)).round({"learn_s": 2})


def _on_prose(prose: Prose, caches: tuple[CacheWay, ...]) -> Iterator[dict[str, Any]]:
    yield from nll_rows(ABOUT_FULL, prose.full, prose.full)
    for number, way in enumerate(caches):
        progress.report(f"SmolLM2, cache {way.label}", number, len(caches))
        options, seconds = known(prose.model, way, prose.calibration)
        report: dict[str, Any] = {}
        found = nll(prose.model, prose.text, way, options, report)
        about = {
            "part": "cache", "method": way.method, "setting": way.label, "code_bits": float(way.num_bits),
            "total_bits": report["bits_per_element"], "codebook_bytes": report["bytes_shared"], "learn_s": seconds,
        }  # fmt: skip
        yield from nll_rows(about, found, prose.full)


def _on_pocketbench(pocket: Pocket, caches: tuple[CacheWay, ...]) -> Iterator[dict[str, Any]]:
    # Fisher weights come from predicted text, and own policies from over all tokens: both are judged on prose.
    held = {way: setting(way) for way in caches if not way.fisher and way.policy == "windowed"}
    for split in SPLITS:
        table = pocket.ask(split, held.values(), keep=True)
        yield from answers(ABOUT_FULL, split, table, table[table["setting"] == FULL])
        for way, found in held.items():
            rows = table[table["setting"] == found.label]
            about = {
                "part": "cache", "method": way.method, "setting": way.label, "code_bits": float(way.num_bits),
                "total_bits": float(rows["bits_per_element"].mean()),
            }  # fmt: skip
            yield from answers(about, split, table, rows)
