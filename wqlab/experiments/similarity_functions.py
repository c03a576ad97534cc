"""Cosine, Pearson and Euclidean similarity: what they find, what plans by them cost, how long they take (WindowQuant, Table 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.errors import MissingPartError
from wqlab.experiments import Experiment, Parameters, gpu_records, scorer_audit
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

LATENCY = "window_search"
#: Drawn in this order; the paper has the first three.
FUNCTIONS = ("cosine", "pearson", "euclidean", "random", "attention_early", "attention_best")
#: Case of the bench -> function and how it is computed.
_CASES = {
    "cosine_closed_form": ("cosine", "closed form"), "cosine_pairwise_blas": ("cosine", "all pairs by BLAS"),
    "pearson": ("pearson", "closed form"), "euclidean": ("euclidean", "all pairs"),
}  # fmt: skip
_PRINTED = {"cosine": "cosine", "Pearson": "pearson", "Euclidean": "euclidean"}


class SimilarityFunctionsParameters(Parameters):
    """Parameters of `similarity_functions`.

    Parameters
    ----------
    split : {"hard", "easy"}
        Which questions of PocketBench; easy ones were recorded at 32 frames only.
    dtype : {"float32", "float64"}
        In which the similarities are timed.
    gpu : str
        Whose records.
    """

    split: Literal["hard", "easy"] = Field("hard", description="which questions")
    dtype: Literal["float32", "float64"] = Field("float32", description="in which the similarities are timed")
    gpu: str = Field("h200", description="whose records of the audit, of answers and of latencies")


@register("stem", "similarity_functions")
class SimilarityFunctions(Experiment[SimilarityFunctionsParameters]):
    """The three functions of Table 11, with random scores and attention beside them, from three records."""

    stem = "similarity_functions"
    title = "Similarity functions: what they find, what they do to answers, how long they take"
    paper = "WindowQuant, Sect. 4.4, Table 11"
    Parameters = SimilarityFunctionsParameters

    def run(self, parameters: SimilarityFunctionsParameters) -> Result:
        """Compute a table of five parts.

        Returns
        -------
        Result
            By ``function``: ``part`` is ``find`` (`scorer_audit.audited`), ``plan`` (`scorer_audit.plans`) or ``difference``
            (`scorer_audit.differences`, against cosine) for the split; ``latency``: per ``device`` and ``way`` the recorded
            ``latency_us`` with ``p10_us`` and ``p90_us``; ``paper``: ``paper_ms`` and ``paper_accuracy``.

        Raises
        ------
        UnknownNameError
            For a GPU key that does not exist.
        MissingPartError
            When a record is missing; says how to get it.
        """
        import pandas as pd

        p = parameters
        records = scorer_audit.needed(p.gpu)
        timed = gpu_records.find(LATENCY, p.gpu)
        if timed is None:
            raise MissingPartError(f"there is no record of the window search on {p.gpu}: {gpu_records.how_to_get(LATENCY, p.gpu)}")
        found = scorer_audit.audited(records).rename(columns={"scorer": "function"})
        changes = scorer_audit.differences(records, p.split).rename(columns={"plan": "function"})
        cells, paper = gpu_records.printed("windowquant_table11")
        printed = [
            {"function": key, "num_frames": 100, "paper_ms": cells[row, "latency"], "paper_accuracy": cells[row, "accuracy"]}
            for row, key in _PRINTED.items()
        ]
        tables = {
            "find": found[found["split"] == p.split],
            "plan": scorer_audit.plans(records, p.split).rename(columns={"plan": "function"}),
            "difference": changes[changes["against"] == "cosine"],
            "latency": _latencies(timed, p.dtype),
            "paper": pd.DataFrame(printed),
        }
        data = pd.concat([table.assign(part=part) for part, table in tables.items()], ignore_index=True)
        data = data[data["function"].isin(FUNCTIONS)].reset_index(drop=True)
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=data,
            evidence={
                **dict.fromkeys(scorer_audit.AUDITED, records.audit.evidence()),
                **dict.fromkeys((*scorer_audit.ANSWERED, *scorer_audit.CHANGES), records.answers.evidence()),
                **dict.fromkeys(("latency_us", "p10_us", "p90_us"), timed.evidence()),
                **dict.fromkeys(
                    ("paper_ms", "paper_accuracy"),
                    Evidence(kind="paper", source="WindowQuant, Table 11, batch 1 and 100 frames on one A800"),
                ),
            },
            values=_values(data),
            inputs=[records.audit.input(), records.answers.input(), timed.input(), paper],
            notes=_notes(data, p.split, timed),
        )


def _latencies(record: Record, dtype: str) -> pd.DataFrame:
    """Return the latency of every function, per device and way of computing it."""
    import pandas as pd

    data = record.data[(record.data["dtype"] == dtype) & record.data["case"].isin(_CASES)]
    return pd.DataFrame(
        {
            "function": data["case"].map({case: names[0] for case, names in _CASES.items()}),
            "way": data["case"].map({case: names[1] for case, names in _CASES.items()}),
            "device": data["device"], "dtype": data["dtype"], "num_visual": data["num_visual"].astype(int),
            "hidden": data["hidden"].astype(int), "latency_us": data["median_us"], "p10_us": data["p10_us"],
            "p90_us": data["p90_us"],
        }
    )  # fmt: skip


def _values(data: pd.DataFrame) -> dict[str, Value]:
    """Return, for the ledger, what each function finds, what its plan costs, its fastest latency, and ratios to cosine's."""
    found: dict[str, tuple[float, str, str]] = {}
    for row in data[data["part"] == "find"].to_dict("records"):
        for name in ("auc", "precision", "gain"):
            for end in ("", "_low", "_high"):
                found[f"{name}_{row['function']}{end}"] = (row[name + end], "1", name + end)
    for part, metrics in (("plan", ("kl", "accuracy")), ("difference", ("kl_change", "accuracy_change"))):
        for row in data[data["part"] == part].to_dict("records"):
            for metric in metrics:
                for end in ("", "_low", "_high"):
                    unit = "nat" if metric.startswith("kl") else "share"
                    found[f"{metric}_{row['function']}_{row['num_frames']:.0f}{end}"] = (row[metric + end], unit, metric + end)
    times = data[data["part"] == "latency"].groupby(["device", "function"])["latency_us"].min()
    for device, function in times.index:
        latency = float(times[device, function])
        found[f"latency_us_{function}_{device}"] = (latency, "us", "latency_us")
        if function != "cosine":
            found[f"latency_{function}_to_cosine_{device}"] = (latency / times[device, "cosine"], "ratio", "latency_us")
    paper = data[data["part"] == "paper"].set_index("function")["paper_ms"]
    for function in paper.index.drop("cosine"):
        found[f"paper_latency_{function}_to_cosine"] = (paper[function] / paper["cosine"], "ratio", "paper_ms")
    return gpu_records.stated(found)


def _notes(data: pd.DataFrame, split: str, timed: Record) -> list[str]:
    find = data[data["part"] == "find"]
    latency = data[data["part"] == "latency"].iloc[0]
    changes = data[(data["part"] == "difference") & data["function"].isin(["pearson", "euclidean", "random"])]
    said = []
    for row in changes.to_dict("records"):
        verdict = scorer_audit.verdict(row["accuracy_change_low"], row["accuracy_change_high"], "fewer", "more", "not told apart")
        numbers = f"{100 * row['accuracy_change_low']:+.1f} to {100 * row['accuracy_change_high']:+.1f} points"
        said.append(f"{row['function']} at {row['num_frames']:.0f} frames {numbers}, {verdict}")
    return [
        f"Pocket VLM, PocketBench {split}, windows of 32 tokens; AUC and precision over {find['n'].iloc[0]:.0f} questions for "
        "which some windows answer and some do not, answers over all; 95 % bootstrap intervals over questions. "
        "Plans: rank, alpha 2, so equal memory.",
        f"Right answers against cosine's plan, paired: {'; '.join(said)}. No interval is widened for their number.",
        f"Latency: scores of all windows of {latency['num_visual']:,.0f} visual tokens (100 frames of 64), width "
        f"{latency['hidden']:.0f}, median of {int(timed.data['repeats'].iloc[0])} calls; cosine in its closed form and as all "
        "pairs by BLAS. The paper does not say what its 48 to 55 ms include; attention needs its layers' share of a prefill "
        "and was not timed.",
        "The printed accuracy is another model's on another benchmark.",
    ]
