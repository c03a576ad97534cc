"""Accuracy against bits: every weight quantizer in all linear layers, and every kind of cache, on prose and on PocketBench."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from wqlab import paths, progress
from wqlab.bench import Bench
from wqlab.quantizers.codebooks import Rotary
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from wqlab.quantizers.weights import LinearStats

#: Stream of PocketBench that chose nothing.
SEED = 1003
FULL = "fp16"


@dataclass(frozen=True)
class Weights:
    """A weight quantizer and its options."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For example ``"awq 4 bits"``."""
        bits = self.options.get("num_bits")
        return self.method if bits is None else f"{self.method} {bits} bits"


@dataclass(frozen=True)
class CacheWay:
    """A way to hold the cache: method, bits, policy; for CQ which keys and which weighting."""

    method: str
    num_bits: int
    policy: str = "windowed"
    rotary: Rotary | None = None
    fisher: bool = False

    @property
    def label(self) -> str:
        """For example ``"cq 2 bits, keys before RoPE, Fisher"``."""
        keys = f", keys {self.rotary} RoPE, {'Fisher' if self.fisher else 'plain'}" if self.rotary else ""
        own = ", own policy" if self.policy not in ("windowed", "full") else ""
        return FULL if self.method == FULL else f"{self.method} {self.num_bits} bits{keys}{own}"


#: bitpack holds 2, 4 and 8 bits; at AQLM's 3 bits there is no round-to-nearest to stand beside it.
WEIGHTS = (
    *(Weights("rtn_weight", {"num_bits": bits}) for bits in (8, 4, 2)),
    *(Weights("awq", {"num_bits": bits}) for bits in (4, 2)),
    Weights("quip"),
    Weights("aqlm"),
    Weights("gptvq"),
)
CACHES = (
    *(CacheWay(method, bits) for method in ("rtn", "kivi") for bits in (4, 2)),
    CacheWay("qoq", 4),
    *(CacheWay("kivi", bits, "kivi") for bits in (4, 2)),
    *(
        CacheWay("cq", bits, rotary=keys, fisher=fisher)
        for bits in (4, 2)
        for keys in ("before", "after")
        for fisher in (False, True)
    ),
)
#: The pair of the paper's end-to-end accuracy.
PAIR = (Weights("quip"), CacheWay("cq", 4, rotary="before"))
SPLITS = ("easy", "hard")
_ABOUT_FULL = {"part": "cache", "method": FULL, "setting": FULL, "code_bits": 16.0, "total_bits": 16.0}
_BOTH = {"part": "both", "method": "quip+cq", "setting": f"{PAIR[0].label} + {PAIR[1].label}"}


@dataclass(frozen=True)
class Size:
    """How much is read.

    Parameters
    ----------
    rows, length : int
        Texts and their tokens, for perplexity; as many tokens, from elsewhere, calibrate.
    questions, num_frames : int
        Of PocketBench per split; 0 questions leaves it out.
    """

    rows: int
    length: int
    questions: int
    num_frames: int = 32


ON_GPU, ON_CPU, QUICK = Size(16, 1024, 320), Size(2, 512, 0), Size(1, 96, 2, 8)


@register("bench", "vq_quality")
class VQQualityBench(Bench):
    """Writes what `vq_quality` reads."""

    name = "vq_quality"
    description = "perplexity and PocketBench with each weight quantizer and each cache (minutes on an H200; prose alone without)"
    columns = {  # noqa: RUF012
        "part": "weights; cache; both",
        "method": "registered quantizer; of both parts, joined by +",
        "setting": "method with bits and, of CQ, which keys and which weighting; fp16 is neither quantized",
        "code_bits": "per weight or cached element: indices or integers alone",
        "codebook_bits": "per weight: codebooks stored with it, 0 for methods without; empty for caches (the model's)",
        "total_bits": "per weight, or per cached element with scales and what stays in 16 bits",
        "codebook_bytes": "of a cache's codebooks, all layers; 0 for methods without",
        "exam": "prose; pocketbench easy; pocketbench hard; layers (the linear layers' own outputs)",
        "metric": "nll, nll_difference (nats per token); accuracy, accuracy_difference, kl, flip_rate; output_error (relative)",
        "n": "texts, questions or layers behind the mean",
        "value": "mean",
        "low": "end of its 95 % interval over texts or questions, paired with full precision; empty where there is none",
        "high": "the other end",
        "learn_s": "seconds of learning or encoding all layers, statistics of the inputs not included; empty when kept from before",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per setting, exam and metric."""
        import pandas as pd

        from wqlab.evals.scoring import find_device

        device = find_device()
        size = QUICK if quick else ON_GPU if device.type == "cuda" else ON_CPU
        weights = WEIGHTS[:1] if quick else WEIGHTS
        caches = (CacheWay("rtn", 4), CacheWay("cq", 2, rotary="before")) if quick else CACHES
        rows = [*_on_prose(device, size, weights, caches)]
        if size.questions:
            rows += _on_pocketbench(device, size, weights, caches)
        return pd.DataFrame(rows)[list(self.columns)].round({"learn_s": 2})


def folder(model: str, ways: Weights) -> Any:
    """Return where the encoded layers of a model are kept between runs."""
    return paths.cache_dir() / "vq" / model / ways.label.replace(" ", "_")


def _on_prose(
    device: torch.device, size: Size, weights: tuple[Weights, ...], caches: tuple[CacheWay, ...]
) -> Iterator[dict[str, Any]]:
    from wqlab.hf.linears import collect_stats
    from wqlab.models import load
    from wqlab.models.prose import prose

    loaded = load("smollm2")
    model = loaded.model.to(device)
    tokens = size.rows * size.length
    calibration = prose(loaded.tokenizer, tokens)[0].reshape(size.rows, size.length).to(device)
    text = prose(loaded.tokenizer, tokens, skip=tokens)[0].reshape(size.rows, size.length).to(device)
    full = _nll(model, text, None, {})
    yield from _nll_rows(_ABOUT_FULL, full, full)
    stats = collect_stats(model, [{"input_ids": row.unsqueeze(0)} for row in calibration])
    for number, way in enumerate(weights):
        progress.report(f"SmolLM2, weights {way.label}", number, len(weights))
        with _quantized(model, "smollm2", way, stats) as about:
            yield about.pop("errors")
            yield from _nll_rows(about, _nll(model, text, None, {}), full)
            if way == PAIR[0]:
                known, _ = _known(model, PAIR[1], calibration)
                held: dict[str, Any] = {}
                found = _nll(model, text, PAIR[1], known, held)
                yield from _nll_rows(about | _BOTH | {"codebook_bytes": held["bytes_shared"]}, found, full)
    for number, cache in enumerate(caches):
        progress.report(f"SmolLM2, cache {cache.label}", number, len(caches))
        known, seconds = _known(model, cache, calibration)
        report: dict[str, Any] = {}
        nll = _nll(model, text, cache, known, report)
        about = {
            "part": "cache", "method": cache.method, "setting": cache.label, "code_bits": float(cache.num_bits),
            "total_bits": report["bits_per_element"], "codebook_bytes": report["bytes_shared"], "learn_s": seconds,
        }  # fmt: skip
        yield from _nll_rows(about, nll, full)


@contextmanager
def _quantized(model: Any, name: str, way: Weights, stats: Mapping[str, LinearStats]) -> Iterator[dict[str, Any]]:
    """Let the model compute with quantized weights; give the columns that describe them, and a row of the layers' errors."""
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
        row = {"exam": "layers", "metric": "output_error", "n": len(errors), "value": sum(errors) / len(errors)}
        about["errors"] = {k: v for k, v in about.items() if k != "errors"} | row
        yield about


def _known(model: Any, way: CacheWay, calibration: Tensor) -> tuple[dict[str, Any], float | None]:
    """Return what a method knows of the model from the calibration text, and the seconds that learning codebooks took."""
    from wqlab.hf import learn_codebooks
    from wqlab.hf.calibration import calibrate
    from wqlab.registry import lookup

    if way.rotary:
        began = time.perf_counter()
        books = learn_codebooks(model, way.num_bits, way.rotary, way.fisher, input_ids=calibration)
        return {"codebooks": books}, time.perf_counter() - began
    if lookup("method", way.method).takes_calibration:
        return {"calibration": calibrate(model, input_ids=calibration)}, None
    return {}, None


def _nll(model: Any, text: Tensor, way: CacheWay | None, known: dict[str, Any], report: dict[str, Any] | None = None) -> Tensor:
    """Return the mean negative log-likelihood of each text, float64 [rows]; with a `way`, each 32 tokens read a quantized past."""
    from wqlab.evals.perplexity import perplexity
    from wqlab.hf import QuantizedKVCache, watch_rotary

    if way is None:
        return perplexity(model, text, lambda: QuantizedKVCache(policy="full"), chunk=text.shape[1]).nll.double().mean(1).cpu()
    rotary = watch_rotary(model) if way.rotary == "before" else None
    setting: dict[str, Any] = {"policy": way.policy, "storage_dtype": torch.float16, "method_options": known, "rotary": rotary}
    found = perplexity(model, text, lambda: QuantizedKVCache(way.method, way.num_bits, **setting))
    if report is not None:
        report.update(found.report)
    return found.nll.double().mean(1).cpu()


def _nll_rows(about: dict[str, Any], nll: Tensor, full: Tensor) -> Iterator[dict[str, Any]]:
    from wqlab.evals.paired import mean_interval

    for metric, values in (("nll", nll), ("nll_difference", nll - full)):
        value, low, high = mean_interval(values.tolist())
        yield about | {"exam": "prose", "metric": metric, "n": len(values), "value": value, "low": low, "high": high}


def _on_pocketbench(
    device: torch.device, size: Size, weights: tuple[Weights, ...], caches: tuple[CacheWay, ...]
) -> Iterator[dict[str, Any]]:
    from wqlab.evals.scoring import score_settings
    from wqlab.models import pocket

    on_gpu = device.type == "cuda"
    loaded = pocket.load(dtype="bfloat16" if on_gpu else "float32")
    loaded.model.to(device)
    common: dict[str, Any] = {
        "seed": SEED, "limit": size.questions, "num_frames": size.num_frames, "batch_size": 48 if on_gpu else 1,
        "out": paths.cache_dir() / "evals",
    }  # fmt: skip
    held = {way: _setting(way) for way in caches if not way.fisher}
    reference = {split: score_settings(loaded, held.values(), split=split, **common) for split in SPLITS}
    for split, table in reference.items():
        yield from _answers(_ABOUT_FULL, split, table, table[table["setting"] == FULL])
        for way, setting in held.items():
            rows = table[table["setting"] == setting.label]
            about = {
                "part": "cache", "method": way.method, "setting": way.label, "code_bits": float(way.num_bits),
                "total_bits": float(rows["bits_per_element"].mean()),
            }  # fmt: skip
            yield from _answers(about, split, table, rows)
    stats = _pocket_stats(loaded, size)
    pair = _setting(PAIR[1])
    for number, weight in enumerate(weights):
        progress.report(f"pocket VLM, weights {weight.label}", number, len(weights))
        with _quantized(loaded.model, "pocket-vlm", weight, stats) as about:
            about.pop("errors")
            for split in SPLITS:
                # Nothing is kept of these: the journal knows the weights by their files, not by what was made of them.
                asked = {**common, "out": None}
                table = score_settings(loaded, [pair] if weight == PAIR[0] else [], split=split, **asked)
                yield from _answers(about, split, reference[split], table[table["setting"] == FULL])
                if weight == PAIR[0]:
                    yield from _answers(about | _BOTH, split, reference[split], table[table["setting"] == pair.label])


def _setting(way: CacheWay) -> Any:
    from wqlab.evals.scoring import Setting

    policy = "published" if way.policy == "kivi" else "span"
    return Setting(way.method, way.num_bits, policy=policy, rotary=way.rotary or "before")  # type: ignore[arg-type]


def _answers(about: dict[str, Any], split: str, reference: pd.DataFrame, mine: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Return the metrics of answers against those of full-precision weights and cache, question by question."""
    from wqlab.evals import paired

    options = [f"log_prob_{i}" for i in range(4)]
    full = reference[reference["setting"] == FULL].sort_values("index")
    mine = mine.sort_values("index")
    if full["index"].tolist() != mine["index"].tolist():
        raise AssertionError("both tables answer the same questions")
    said = paired.summarise(full[options].to_numpy(), mine[options].to_numpy(), mine["answer"].to_numpy())
    for metric in ("accuracy", "accuracy_difference", "kl", "flip_rate"):
        low, high = said[f"{metric}_interval"]
        yield about | {
            "exam": f"pocketbench {split}",
            "metric": metric,
            "n": said["n"],
            "value": said[metric],
            "low": low,
            "high": high,
        }


def _pocket_stats(loaded: Any, size: Size) -> dict[str, LinearStats]:
    """Return the statistics of the language model's linear layers over videos of the development stream and their questions."""
    from wqlab.evals.scoring.facts import ModelFacts
    from wqlab.hf.linears import collect_stats

    facts = [ModelFacts(loaded, split, size.num_frames) for split in ("easy", "hard")]
    return collect_stats(loaded.model, [{"inputs_embeds": found.embeddings} for found in facts])


def _wait(model: Any) -> None:
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
