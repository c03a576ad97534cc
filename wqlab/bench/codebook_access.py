"""How often each entry of a codebook is read: real weights of SmolLM2, and its real cache over prose nobody learnt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab import progress
from wqlab.bench import Bench, Headline
from wqlab.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    import torch
    from numpy.typing import NDArray

    from wqlab.hf.kv_codebooks import KVSamples

#: A layer in the middle of 30, and its linear layers that are encoded: of three shapes.
LAYER = 14
LINEARS, QUICK_LINEARS = ("mlp.down_proj", "mlp.gate_proj", "self_attn.q_proj"), ("self_attn.k_proj",)
METHODS = ("quip", "aqlm", "gptvq")
CQ_BITS = (4, 2)
#: Equal parts of a tensor, and the hottest entries that are followed through them (VQ-LLM, Fig. 9).
PARTS, HOTTEST = 12, 24
#: An entry is hot above the mean by this many standard deviations (VQ-LLM, Sect. V).
SIGMAS = 3
#: Books of a tensor whose curves are kept; a summary is kept of all.
_CURVES = 8
_ENTRY = "entries, accesses, mean, sigma, hot, below_mean, hot_share, unused, hot_in_parts, correlation, correlation_shuffled"


@dataclass(frozen=True)
class Size:
    """How much prose calibrates, and how much as well, from elsewhere, fills the cache whose accesses are counted."""

    rows: int
    length: int


ON_GPU, ON_CPU, QUICK = Size(16, 1024), Size(8, 512), Size(1, 96)


@register("bench", "codebook_access")
class CodebookAccessBench(Bench):
    """Writes what `codebook_access` reads. A read is one vector that is decoded, so each position counts once."""

    name = "codebook_access"
    description = "how often each codebook entry is read, SmolLM2's weights and cache (a minute on an H200, ten without)"
    columns = {  # noqa: RUF012
        "kind": f"sorted: counts by rank; parts: counts of the hottest entries by part of the tensor; summary: a book's {_ENTRY}",
        "method": "registered quantizer of weights; cq_4 and cq_2, keys before RoPE",
        "tensor": f"linear layer of decoder layer {LAYER}, or its key or value",
        "book": "quip: pass; gptvq: tile; cq: head times groups plus group",
        "rank": "0 is the most frequent entry; sorted: ranks up to the next row have this row's count",
        "part": f"of {PARTS} equal ones, in the order of rows (weights) or tokens (cache)",
        "count": "reads of the entry",
        "books": "codebooks of the tensor",
        "entries": "entries of the book",
        "entry_bytes": "bytes of one entry as stored",
        "accesses": "reads of the book",
        "mean": "reads per entry",
        "sigma": "standard deviation of the reads over entries",
        "hot": f"entries read more often than mean + {SIGMAS} sigma",
        "below_mean": "share of the entries that are read less often than the mean",
        "hot_share": "share of the reads that hot entries get",
        "unused": "entries that are never read",
        "hot_in_parts": f"share of (hot entry, part) that are above mean + {SIGMAS} sigma of that part too; empty without hot ones",
        "correlation": "mean rank correlation of the entries' counts over pairs of parts",
        "correlation_shuffled": "the same once the positions are shuffled: what it is where all parts are alike",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return the curves, parts and summary of every book that is kept."""
        import pandas as pd

        rows = [row for counted in _books(quick) for row in _rows(*counted)]
        data = pd.DataFrame(rows, columns=list(self.columns))
        whole = ["rank", "part", "count", "books", "entries", "accesses", "hot", "unused"]
        data[whole] = data[whole].astype("Int64")
        return data.round(6)

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the mean number of hot entries of each method's codebooks."""
        rows = data[data["kind"] == "summary"]
        claims = {"quip": "table5-hot-quip", "aqlm": "table5-hot-aqlm", "gptvq": "table5-hot-gptvq", "cq_2": "table5-hot-cq-2"}
        return [
            Headline(
                f"hot entries of a codebook, {method}, a mean over books", float(hot), None, "entries", claims.get(str(method))
            )
            for method, hot in rows.groupby("method", sort=False)["hot"].mean().items()
        ]


def _books(quick: bool) -> Iterator[tuple[str, str, NDArray[Any], int, float]]:
    """Yield method, tensor, indices int64 [books, positions] (-1: none), entries of a book and bytes of an entry."""
    from wqlab.evals.scoring import find_device
    from wqlab.hf.kv_codebooks import sample_kv
    from wqlab.hf.linears import collect_stats, decoder_linears
    from wqlab.models import load
    from wqlab.models.prose import prose
    from wqlab.quantizers.weights import create_weight_quantizer

    device = find_device()
    size = QUICK if quick else ON_GPU if device.type == "cuda" else ON_CPU
    loaded = load("smollm2")
    model = loaded.model.to(device)
    tokens = size.rows * size.length
    calibration = prose(loaded.tokenizer, tokens)[0].reshape(size.rows, size.length).to(device)
    text = prose(loaded.tokenizer, tokens, skip=tokens)[0].reshape(size.rows, size.length).to(device)

    stats = collect_stats(model, [{"input_ids": row.unsqueeze(0)} for row in calibration])
    linears = {f".{LAYER}.{name}": name for name in (QUICK_LINEARS if quick else LINEARS)}
    chosen = {linears[end]: layer for layer in decoder_linears(model) for end in linears if layer.endswith(end)}
    methods, widths = (METHODS[:1], CQ_BITS[-1:]) if quick else (METHODS, CQ_BITS)
    total, done = len(methods) * len(chosen) + len(widths), 0
    for method in methods:
        quantizer = create_weight_quantizer(method)
        for tensor, layer in chosen.items():
            progress.report(f"{method}, {tensor}", done, total)
            done += 1
            encoded = quantizer.quantize(decoder_linears(model)[layer].weight.detach(), stats[layer])
            indices = quantizer.entry_indices(encoded)
            if indices is None:
                raise AssertionError(f"{method} has codebooks")
            entries = quantizer.stored_entries
            stored = sum(t.nbytes for t in encoded.codebooks.values()) / (indices.shape[0] * entries)
            yield method, tensor, indices.cpu().numpy(), entries, stored
    learnt, held_out = (sample_kv(model, "before", input_ids=ids)[LAYER] for ids in (calibration, text))
    for bits in widths:
        progress.report(f"CQ, {bits} bits", done, total)
        done += 1
        for role in ("key", "value"):
            yield f"cq_{bits}", role, *_cache_indices(learnt, held_out, role, bits)


def _cache_indices(learnt: KVSamples, held_out: KVSamples, role: str, bits: int) -> tuple[NDArray[Any], int, float]:
    """Learn CQ's codebooks on one text; return the indices of the other's cache, entries of a book and bytes of an entry."""
    from wqlab.quantizers import codebooks
    from wqlab.quantizers.cq import VECTOR_SIZES

    entries, _ = codebooks.learn(getattr(learnt, role), VECTOR_SIZES[bits])
    indices = by_book(codebooks.nearest_entries(getattr(held_out, role), entries))
    return indices, entries.shape[2], float(entries.shape[3] * entries.element_size())


def by_book(codes: torch.Tensor) -> NDArray[Any]:
    """Return codes [batch, heads, seq, groups] as int64 [heads * groups, batch * seq]."""
    found: NDArray[Any] = codes.permute(1, 3, 0, 2).flatten(0, 1).flatten(1).long().cpu().numpy()
    return found


def _rows(method: str, tensor: str, indices: NDArray[Any], entries: int, entry_bytes: float) -> Iterator[dict[str, Any]]:
    books = len(indices)
    about = {"method": method, "tensor": tensor}
    curves = set(np.linspace(0, books - 1, min(books, _CURVES)).round().astype(int).tolist())
    for book, row in enumerate(indices):
        read = row[row >= 0]
        counts = np.bincount(read, minlength=entries)
        by_part = part_counts(read, entries)
        here = {**about, "book": book}
        if book in curves:
            yield from ({**here, "kind": "sorted", "rank": rank, "count": count} for rank, count in steps(counts))
        if book == 0:
            hottest = np.argsort(-counts, kind="stable")[:HOTTEST]
            for rank, entry in enumerate(hottest):
                for part, count in enumerate(by_part[:, entry].tolist()):
                    yield {**here, "kind": "parts", "rank": rank, "part": part, "count": count}
        shuffled = np.random.default_rng(book).permutation(read)
        yield {
            **here, "kind": "summary", "books": books, "entry_bytes": entry_bytes, **summary(counts),
            "hot_in_parts": hot_in_parts(counts, by_part), "correlation": rank_correlation(by_part),
            "correlation_shuffled": rank_correlation(part_counts(shuffled, entries)),
        }  # fmt: skip


def summary(counts: NDArray[Any]) -> dict[str, float]:
    """Return what a book's counts [entries] are like: ``entries`` to ``unused`` of the record's columns."""
    hot = counts > counts.mean() + SIGMAS * counts.std()
    return {
        "entries": len(counts), "accesses": int(counts.sum()), "mean": float(counts.mean()), "sigma": float(counts.std()),
        "hot": int(hot.sum()), "below_mean": float((counts < counts.mean()).mean()),
        "hot_share": float(counts[hot].sum() / counts.sum()), "unused": int((counts == 0).sum()),
    }  # fmt: skip


def steps(counts: NDArray[Any]) -> list[tuple[int, int]]:
    """Return (rank, count) of the sorted counts where the count changes: all of them, in fewer rows."""
    ordered = np.sort(counts)[::-1]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[0] + 1))
    return list(zip(first.tolist(), ordered[first].tolist(), strict=True))


def part_counts(read: NDArray[Any], entries: int, parts: int = PARTS) -> NDArray[Any]:
    """Return int64 [parts, entries]: reads of each entry in each of `parts` runs of positions, as equal as can be."""
    return np.stack([np.bincount(part, minlength=entries) for part in np.array_split(read, parts)])


def hot_in_parts(counts: NDArray[Any], by_part: NDArray[Any]) -> float:
    """Return how many of the tensor's hot entries a part finds hot too, a mean over parts; NaN where none is hot."""
    hot = counts > counts.mean() + SIGMAS * counts.std()
    limit = by_part.mean(1, keepdims=True) + SIGMAS * by_part.std(1, keepdims=True)
    return float((by_part > limit)[:, hot].mean()) if hot.any() else float("nan")


def rank_correlation(by_part: NDArray[Any]) -> float:
    """Return Spearman's rank correlation of the counts [parts, entries], a mean over pairs of parts.

    Equal counts share their mean rank. A part in which all entries are read alike has no order and is left out; NaN where fewer
    than two are left.
    """
    import pandas as pd

    ranks = pd.DataFrame(by_part).rank(axis=1).to_numpy()
    ranks = ranks[ranks.std(1) > 0]
    if len(ranks) < 2:
        return float("nan")
    pairs = np.corrcoef(ranks)[np.triu_indices(len(ranks), 1)]
    return float(pairs.mean())
