"""How unevenly codebook entries are read, whether all parts of a tensor agree, and what a block's codebooks weigh (Table V)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.errors import MissingPartError
from wqlab.experiments import Experiment, Parameters, gpu_records
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

RECORD = "codebook_access"
#: Methods of the record -> their names in the paper's tables.
PRINTED = {"quip": "QuiP#-4", "aqlm": "AQLM-3", "gptvq": "GPTVQ-2", "cq_4": "CQ-4", "cq_2": "CQ-2"}
#: A row of GPTVQ's tiles and a head are read through: Llama-7B's sizes, for which Table V counts, and SmolLM2-135M's.
_INPUTS, _HEAD_DIM = 4096, 128
_OUR_INPUTS, _OUR_HEAD_DIM = {"mlp.down_proj": 1536, "mlp.gate_proj": 576, "self_attn.q_proj": 576}, 64
_TILE = 256
_CHANNELS = {"cq_4": 2, "cq_2": 4}
#: value of the result -> column of a book's summary, and its unit.
_VALUES = {
    "hot": ("hot", "entries"),
    "below_mean": ("below_mean", "share"),
    "hot_share": ("hot_share", "share"),
    "unused": ("unused", "entries"),
    "hot_in_parts": ("hot_in_parts", "share"),
    "part_correlation": ("correlation", "1"),
    "part_correlation_shuffled": ("correlation_shuffled", "1"),
}
_RECORDED = ("count", "relative", "mean", "sigma", "unused", "hot_share", "hot_in_parts", "correlation", "correlation_shuffled")
_RANGES = ("hot", "below_mean")


class CodebookAccessParameters(Parameters):
    """Parameters of `codebook_access`.

    Parameters
    ----------
    method : {"quip", "aqlm", "gptvq", "cq_4", "cq_2"}
        Whose hottest entries are followed through the parts of the tensor.
    weight : {"mlp.down_proj", "mlp.gate_proj", "self_attn.q_proj"}
        The linear layer shown, of decoder layer 14 of SmolLM2, for quantizers of weights.
    cache : {"key", "value"}
        What of the same layer's cache is shown, for CQ.
    gpu : str
        Whose record; ``"cpu"`` is one of a machine without a GPU.
    """

    method: Literal["quip", "aqlm", "gptvq", "cq_4", "cq_2"] = Field("quip", description="whose hottest entries are followed")
    weight: Literal["mlp.down_proj", "mlp.gate_proj", "self_attn.q_proj"] = Field("mlp.down_proj", description="linear layer")
    cache: Literal["key", "value"] = Field("key", description="part of the cache, for CQ")
    gpu: str = Field("cpu", description="whose record of accesses; cpu: of a machine without a GPU")


@register("stem", "codebook_access")
class CodebookAccess(Experiment[CodebookAccessParameters]):
    """Accesses from the record; bytes of a block's codebooks counted from the entries as they are stored."""

    stem = "codebook_access"
    title = "How often codebook entries are read"
    paper = "VQ-LLM, Sect. V, Fig. 8, Fig. 9, Table V"
    Parameters = CodebookAccessParameters

    def run(self, parameters: CodebookAccessParameters) -> Result:
        """Compute four parts in one table.

        Returns
        -------
        Result
            ``part == "sorted"``: of the chosen tensors per ``method`` and ``book`` the ``count`` from ``rank`` on, up to the next
            row's rank, and ``relative``, the count over the book's mean. ``"heatmap"``: ``relative``, the count of the chosen
            method's hottest entries of book 0 (``rank``) in each ``run`` of positions over the run's mean. ``"books"``: the
            record's summary of each book of the chosen tensors. ``"methods"``: per method means over all recorded tensors and
            their whole books, the least and the greatest such book of ``hot`` and ``below_mean``, ``kb`` of codebooks that a
            block of threads needs at Llama-7B's sizes, ``kb_here`` at those of the chosen tensor, and what Table V prints. A
            book is whole unless the tensor has one that is read more often: GPTVQ's tiles at an edge are smaller, and with few
            reads per entry chance alone makes some hot. Llama-7B's sizes have no such tiles.

            ``values`` per method m: ``hot_m``, ``below_mean_m``, ``hot_share_m``, ``unused_m``, ``part_correlation_m``,
            ``part_correlation_shuffled_m`` and ``hot_in_parts_m`` are those means, each whole book alike; ``codebook_kb_m`` is
            ``kb``. ``below_mean_least`` and ``part_correlation_kept_least`` are those of the method where they are least; the
            latter is the correlation between parts over that of shuffled positions.

        Raises
        ------
        MissingPartError
            When nothing was recorded on this GPU, or not the chosen method.
        """
        import pandas as pd

        p = parameters
        record = gpu_records.needed(RECORD, p.gpu, "accesses to codebook entries")
        # Whole numbers of the record may be missing, which only pandas' own integers know; arithmetic here is in float64.
        data = record.data.astype(dict.fromkeys(record.data.select_dtypes("Int64").columns, float))
        tensors: dict[str, str] = {method: p.cache if method in _CHANNELS else p.weight for method in PRINTED}
        chosen = data[data["tensor"] == data["method"].map(tensors)]
        books = chosen[chosen["kind"] == "summary"].drop(columns=["rank", "part", "count"]).assign(part="books")
        methods = _methods(data, tensors)
        if p.method not in set(methods["method"]):
            raise MissingPartError(f"the record of accesses on {p.gpu} lacks {p.method}: {gpu_records.how_to_get(RECORD, p.gpu)}")
        means = books.set_index(["method", "book"])["mean"].rename("book_mean")
        curves = chosen[chosen["kind"] == "sorted"][["method", "tensor", "book", "rank", "count"]]
        curves = curves.join(means, on=["method", "book"])
        curves = curves.assign(part="sorted", relative=curves["count"] / curves["book_mean"]).drop(columns="book_mean")
        cells, paper = gpu_records.printed("vqllm_table5")
        methods = _with_paper(methods, cells)
        formula = Evidence(
            kind="simulated",
            source=f"entries as stored, times the codebooks that a block reads: QuIP# one table, AQLM one per residual, GPTVQ one "
            f"per tile of {_TILE} inputs, CQ one per group of a head; {_INPUTS:,} inputs and heads of {_HEAD_DIM} (Llama-7B)",
        )
        evidence = dict.fromkeys([*_RECORDED, *(f"{c}{end}" for c in _RANGES for end in ("", "_low", "_high"))], record.evidence())
        evidence |= dict.fromkeys(("kb", "kb_here"), formula)
        printed = Evidence(kind="paper", source="VQ-LLM, Table V")
        evidence |= dict.fromkeys(("paper_hot_low", "paper_hot_high", "paper_kb"), printed)
        tables = [curves, _heatmap(chosen, p.method), books, methods.assign(part="methods")]
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=pd.concat(tables, ignore_index=True).drop(columns=["kind"]),
            evidence=evidence,
            values=_values(methods),
            inputs=[record.input(), paper],
            notes=[
                *_absent(methods),
                f"SmolLM2-135M, decoder layer 14: {p.weight} for weights, the {p.cache} cache over {_tokens(books)}prose that no "
                "codebook learnt from for CQ (keys before RoPE). Hot: above the mean by more than 3 standard deviations. Bars are "
                "means over the codebooks of the recorded tensors, whiskers the least and the greatest; GPTVQ's smaller tiles at "
                "an edge are left out of them.",
                "The paper counts in Llama-7B, per block of threads of one kernel; Table V does not list CQ-4. QuIP#'s two passes "
                "share one table; once each is sorted by its own frequencies they need two, 4 KB.",
            ],
        )


def _absent(methods: pd.DataFrame) -> list[str]:
    """Return a note that names the paper's methods that the record lacks; an empty list when it has all."""
    names = [name for method, name in PRINTED.items() if method not in set(methods["method"])]
    return [f"Not in this record, and in none of the means: {', '.join(names)}."] if names else []


def _tokens(books: pd.DataFrame) -> str:
    """Return how many tokens CQ's accesses were counted over, in words; nothing where CQ was not recorded."""
    counted = books.loc[books["method"].isin(list(_CHANNELS)), "accesses"]
    return "" if counted.empty else f"{counted.iloc[0]:,.0f} tokens of "


def _methods(data: pd.DataFrame, tensors: dict[str, str]) -> pd.DataFrame:
    """Return one row per recorded method, in the order of the paper's table."""
    import pandas as pd

    summaries = data[data["kind"] == "summary"]
    most = summaries.groupby(["method", "tensor"])["accesses"].transform("max")
    summaries = summaries[summaries["accesses"] == most]
    rows = []
    for method in PRINTED:
        mine = summaries[summaries["method"] == method]
        if mine.empty:
            continue
        row: dict[str, object] = {"method": method, "books": len(mine)}
        row |= {column: float(mine[column].mean()) for column, _ in _VALUES.values()}
        for column in _RANGES:
            row |= {f"{column}_low": float(mine[column].min()), f"{column}_high": float(mine[column].max())}
        one = float((mine["entries"] * mine["entry_bytes"]).iloc[0]) / 1024
        tensor = tensors[method]
        row["kb"] = one * _books_of_a_block(method, _INPUTS, _HEAD_DIM)
        row["kb_here"] = one * _books_of_a_block(method, _OUR_INPUTS.get(tensor, 0), _OUR_HEAD_DIM)
        rows.append(row)
    return pd.DataFrame(rows)


def _books_of_a_block(method: str, inputs: int, head_dim: int) -> int:
    """Return how many codebooks a block of threads reads that goes through all inputs of some rows, or all channels of a head."""
    if method == "gptvq":
        return -(-inputs // _TILE)
    return head_dim // _CHANNELS[method] if method in _CHANNELS else {"quip": 1, "aqlm": 2}[method]


def _with_paper(methods: pd.DataFrame, cells: dict[tuple[str, str], float]) -> pd.DataFrame:
    """Add ``paper_hot_low``, ``paper_hot_high`` (a bound alone: from 0) and ``paper_kb``; empty where Table V prints nothing."""
    import pandas as pd

    rows = []
    for name in methods["method"].map(PRINTED):
        below = cells.get((name, "hot entries below"), math.nan)
        low = cells.get((name, "hot entries from"), 0 * below)
        rows.append((low, cells.get((name, "hot entries to"), below), cells.get((name, "codebook per block"), math.nan)))
    found = pd.DataFrame(rows, columns=["paper_hot_low", "paper_hot_high", "paper_kb"], index=methods.index)
    return pd.concat([methods, found], axis=1)


def _heatmap(chosen: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return the counts of the hottest entries in each run of positions, over the run's mean count of an entry."""
    rows = chosen[(chosen["kind"] == "parts") & (chosen["method"] == method)]
    book = chosen[(chosen["kind"] == "summary") & (chosen["method"] == method) & (chosen["book"] == 0)].iloc[0]
    runs = int(rows["part"].max()) + 1
    found = rows[["method", "tensor", "book", "rank", "count"]].assign(run=rows["part"], part="heatmap")
    # Runs are of equal length up to one position.
    return found.assign(relative=rows["count"] / (book["mean"] / runs))


def _values(methods: pd.DataFrame) -> dict[str, Value]:
    found: dict[str, tuple[float, str, str]] = {}
    for row in methods.to_dict("records"):
        for name, (column, unit) in _VALUES.items():
            found[f"{name}_{row['method']}"] = (row[column], unit, column)
        found[f"codebook_kb_{row['method']}"] = (row["kb"], "KB", "kb")
    found["below_mean_least"] = (float(methods["below_mean"].min()), "share", "below_mean")
    kept = (methods["correlation"] / methods["correlation_shuffled"]).min()
    found["part_correlation_kept_least"] = (float(kept), "ratio", "correlation")
    return gpu_records.stated(found)
