"""What the benches of vector quantization share: ways to hold weights and caches, the two models, and the rows of their records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wqlab import paths
from wqlab.quantizers.codebooks import Rotary

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


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
    *(Weights("rtn_weight", {"num_bits": bits}) for bits in (4, 2)),
    *(Weights("awq", {"num_bits": bits}) for bits in (4, 2)),
    Weights("quip"),
    Weights("aqlm"),
    Weights("gptvq"),
)
CACHES = (
    *(CacheWay(method, bits) for method in ("rtn", "kivi") for bits in (4, 2)),
    CacheWay("qoq", 4),
    *(CacheWay("kivi", bits, "kivi") for bits in (4, 2)),
    *(CacheWay("cq", bits, rotary=keys) for bits in (4, 2) for keys in ("before", "after")),
    *(CacheWay("cq", bits, rotary="before", fisher=True) for bits in (4, 2)),
)
#: The pair of the paper's end-to-end accuracy.
PAIR = (Weights("quip"), CacheWay("cq", 4, rotary="before"))
SPLITS = ("easy", "hard")
ABOUT_FULL = {"part": "cache", "method": FULL, "setting": FULL, "code_bits": 16.0, "total_bits": 16.0}
BOTH = {"part": "both", "method": "quip+cq", "setting": f"{PAIR[0].label} + {PAIR[1].label}"}


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


#: Of both records.
COLUMNS = {
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
ON_GPU, ON_CPU, QUICK = Size(16, 1024, 256), Size(4, 1024, 0), Size(1, 96, 2, 8)


class Prose(NamedTuple):
    """SmolLM2 and its texts: token ids [rows, length] that calibrate and that are judged, and each judged text's loss in FP16."""

    model: Any
    calibration: Tensor
    text: Tensor
    full: Tensor

    @classmethod
    def load(cls, device: torch.device, size: Size) -> Prose:
        """Load the model on `device` and read the judged texts in full precision."""
        from wqlab.models import load
        from wqlab.models.prose import prose

        loaded = load("smollm2")
        model = loaded.model.to(device)
        tokens = size.rows * size.length
        taught, judged = (
            prose(loaded.tokenizer, tokens, skip=skip)[0].reshape(size.rows, size.length).to(device) for skip in (0, tokens)
        )
        return cls(model, taught, judged, nll(model, judged, None, {}))


def known(model: Any, way: CacheWay, calibration: Tensor) -> tuple[dict[str, Any], float | None]:
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


def nll(model: Any, text: Tensor, way: CacheWay | None, known: dict[str, Any], report: dict[str, Any] | None = None) -> Tensor:
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


def nll_rows(about: dict[str, Any], found: Tensor, full: Tensor) -> Iterator[dict[str, Any]]:
    """Return the rows of a loss [texts], itself and against full precision, text by text."""
    from wqlab.evals.paired import mean_interval

    for metric, values in (("nll", found), ("nll_difference", found - full)):
        value, low, high = mean_interval(values.tolist())
        yield about | {"exam": "prose", "metric": metric, "n": len(values), "value": value, "low": low, "high": high}


class Pocket(NamedTuple):
    """The pocket VLM and the questions that are asked of it."""

    loaded: Any
    common: dict[str, Any]

    @classmethod
    def load(cls, device: torch.device, size: Size) -> Pocket:
        """Load the model on `device`."""
        from wqlab.models import pocket

        on_gpu = device.type == "cuda"
        loaded = pocket.load(dtype="bfloat16" if on_gpu else "float32")
        loaded.model.to(device)
        batch = 48 if on_gpu else 1
        return cls(loaded, {"seed": SEED, "limit": size.questions, "num_frames": size.num_frames, "batch_size": batch})

    def ask(self, split: str, settings: Iterable[Any] = (), keep: bool = False) -> pd.DataFrame:
        """Return the answers of a split with these caches, full precision among them; `keep`: an interrupted run is continued."""
        from wqlab.evals.scoring import score_settings

        # Of quantized weights nothing is kept: the journal knows weights by their files, not by what was made of them.
        return score_settings(self.loaded, settings, split=split, out=paths.cache_dir() / "evals" if keep else None, **self.common)


def setting(way: CacheWay) -> Any:
    """Return PocketBench's setting of a cache; in span, every whole window of the video is encoded."""
    from wqlab.evals.scoring import Setting

    return Setting(way.method, way.num_bits, rotary=way.rotary or "before")


def answers(about: dict[str, Any], split: str, reference: pd.DataFrame, mine: pd.DataFrame) -> Iterator[dict[str, Any]]:
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
