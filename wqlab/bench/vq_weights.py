"""Accuracy against bits with each weight quantizer in all linear layers, on prose and on PocketBench."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from wqlab import paths, progress
from wqlab.bench import Bench
from wqlab.bench.vq_ways import (
    BOTH,
    COLUMNS,
    FULL,
    ON_CPU,
    ON_GPU,
    PAIR,
    QUICK,
    SPLITS,
    WEIGHTS,
    Pocket,
    Prose,
    Size,
    Weights,
    answers,
    known,
    nll,
    nll_rows,
    setting,
)
from wqlab.registry import register

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from wqlab.quantizers.weights import LinearStats


@register("bench", "vq_weights")
class VQWeightsBench(Bench):
    """Writes what `vq_quality` reads of weights, and of the paper's pair of weights and cache."""

    name = "vq_weights"
    description = "perplexity and PocketBench with each weight quantizer (15 min on an H200; prose alone without, hours)"
    columns = COLUMNS

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per setting, exam and metric. Encoded layers are kept, so that an interrupted run goes on."""
        import pandas as pd

        from wqlab.evals.scoring import find_device

        device = find_device()
        size = QUICK if quick else ON_GPU if device.type == "cuda" else ON_CPU
        weights = WEIGHTS[:1] if quick else WEIGHTS
        # Without a GPU the codebooks of the pair's cache alone would take half an hour: the pair is left out with PocketBench.
        rows = [*_on_prose(Prose.load(device, size), weights, pair=size.questions > 0)]
        if size.questions:
            rows += _on_pocketbench(Pocket.load(device, size), size, weights)
        return pd.DataFrame(rows, columns=list(COLUMNS)).round({"learn_s": 2})


def folder(model: str, way: Weights) -> Path:
    """Return where the encoded layers of a model are kept between runs."""
    return paths.cache_dir() / "vq" / model / way.label.replace(" ", "_")


def _on_prose(prose: Prose, weights: tuple[Weights, ...], pair: bool) -> Iterator[dict[str, Any]]:
    from wqlab.hf.linears import collect_stats

    model = prose.model
    stats = collect_stats(model, [{"input_ids": row.unsqueeze(0)} for row in prose.calibration])
    for number, way in enumerate(weights):
        progress.report(f"SmolLM2, weights {way.label}", number, len(weights))
        with _quantized(model, "smollm2", way, stats) as (about, errors):
            yield about | errors
            yield from nll_rows(about, nll(model, prose.text, None, {}), prose.full)
            if pair and way == PAIR[0]:
                books, _ = known(model, PAIR[1], prose.calibration)
                held: dict[str, Any] = {}
                found = nll(model, prose.text, PAIR[1], books, held)
                yield from nll_rows(about | BOTH | {"codebook_bytes": held["bytes_shared"]}, found, prose.full)


@contextmanager
def _quantized(
    model: Any, name: str, way: Weights, stats: Mapping[str, LinearStats]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Let the model compute with quantized weights; give the columns that describe them, and those of the layers' errors."""
    from wqlab.hf.linears import decoder_linears, mean_bits, quantize_linears
    from wqlab.quantizers.weights import create_weight_quantizer, weighted_error

    before = {layer: linear.weight.data for layer, linear in decoder_linears(model).items()}
    kept = folder(name, way)
    fresh = not kept.is_dir()
    began = time.perf_counter()
    with quantize_linears(model, way.method, stats, kept, **way.options) as layers:
        _wait(model)
        seconds = time.perf_counter() - began
        bits = mean_bits(layers)
        about: dict[str, Any] = {
            "part": "weights", "method": way.method, "setting": way.label, "total_bits": bits["total"],
            "code_bits": create_weight_quantizer(way.method, **way.options).code_bits, "codebook_bits": bits["codebooks"],
            "codebook_bytes": 0, "learn_s": seconds if fresh else None,
        }  # fmt: skip
        errors = [
            weighted_error(before[layer], linear.weight.data, stats[layer].hessian)
            for layer, linear in decoder_linears(model).items()
        ]
        yield about, {"exam": "layers", "metric": "output_error", "n": len(errors), "value": sum(errors) / len(errors)}


def _on_pocketbench(pocket: Pocket, size: Size, weights: tuple[Weights, ...]) -> Iterator[dict[str, Any]]:
    model = pocket.loaded.model
    full = {split: pocket.ask(split, keep=True) for split in SPLITS}
    stats = _stats(pocket.loaded, size)
    pair = setting(PAIR[1])
    for number, way in enumerate(weights):
        progress.report(f"pocket VLM, weights {way.label}", number, len(weights))
        with _quantized(model, "pocket-vlm", way, stats) as (about, _):
            for split in SPLITS:
                table = pocket.ask(split, [pair] if way == PAIR[0] else [])
                yield from answers(about, split, full[split], table[table["setting"] == FULL])
                if way == PAIR[0]:
                    yield from answers(about | BOTH, split, full[split], table[table["setting"] == pair.label])


def _stats(loaded: Any, size: Size) -> dict[str, LinearStats]:
    """Return the statistics of the language model's linear layers over videos of the development stream and their questions."""
    from wqlab.evals.scoring.facts import ModelFacts
    from wqlab.hf.linears import collect_stats

    facts = [ModelFacts(loaded, split, size.num_frames) for split in SPLITS]
    return collect_stats(loaded.model, [{"inputs_embeds": found.embeddings} for found in facts])


def _wait(model: Any) -> None:
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
