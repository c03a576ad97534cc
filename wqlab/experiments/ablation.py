"""WindowQuant without one of its modules, and with plans that know more or less (WindowQuant, Tables 7 and 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.evals import paired
from wqlab.experiments import Experiment, Parameters, answers, gpu_records
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

#: Key of a variant -> its name in the figure.
NAMES = {
    "int2": "INT2 everywhere", "plan": "WindowQuant", "no_first_window": "without first window", "permuted_0": "random plan",
    "permuted_1": "random plan, again", "truth": "plan that knows\nthe answer's windows", "inverse": "its inverse",
    "int4": "INT4 everywhere",
}  # fmt: skip
#: Key -> row of Table 8.
_PRINTED = {"plan": "WindowQuant", "no_first_window": "without first window", "permuted_0": "random plan", "fp16": "full precision"}
_FRAMES = (32, 100)


class AblationParameters(Parameters):
    """Parameters of `ablation`.

    Parameters
    ----------
    normalize : {"rank", "minmax"}
        How similarities reach the thresholds; at 100 frames ``rank`` was recorded.
    num_frames : {32, 100}
        Frames per video.
    metric : str
        What is drawn; all are in the table.
    gpu : str
        Whose records.
    """

    normalize: Literal["rank", "minmax"] = Field("rank", description="how similarities reach the thresholds")
    num_frames: Literal[32, 100] = Field(32, description="frames per video")
    metric: Literal["kl", "accuracy", "accuracy_difference", "flip_rate", "margin_difference"] = Field(
        "kl", description="what is drawn"
    )
    gpu: str = Field("h200", description="whose records of answers and of kernels")


@register("stem", "ablation")
class Ablation(Experiment[AblationParameters]):
    """Answers of the pocket VLM per variant, from a record; what reordering costs, from a record of kernels; the printed table."""

    stem = "ablation"
    title = "WindowQuant without each of its modules"
    paper = "WindowQuant, Sect. 4.3, Tables 7 and 8"
    Parameters = AblationParameters

    def run(self, parameters: AblationParameters) -> Result:
        """Compute a table of three parts.

        Returns
        -------
        Result
            ``part == "answers"``: per ``variant`` the columns of `wqlab.experiments.answers.summarised`, for 32 and 100 frames.
            ``part == "difference"``: of ``variant`` against WindowQuant, question by question: ``gain`` in accuracy and
            ``kl_change`` with ``_low`` and ``_high``; negative gains are losses. ``part == "paper"``: ``paper_accuracy`` and
            ``paper_tokens_per_s`` of Table 8.

        Raises
        ------
        MissingPartError
            When the answers were not recorded on that GPU.
        """
        import pandas as pd

        p = parameters
        record = answers.needed(p.gpu)
        tables = [_variants(record, p.normalize, frames) for frames in _FRAMES]
        tables += [_differences(record, p.normalize, frames) for frames in _FRAMES]
        cells, paper = gpu_records.printed("windowquant_table8")
        rows = [
            {
                "part": "paper", "variant": key, "paper_accuracy": cells[row, "accuracy"],
                "paper_tokens_per_s": cells[row, "decode throughput"],
            }
            for key, row in (*_PRINTED.items(), ("without_reorder", "without reorder"))
        ]  # fmt: skip
        data = pd.concat([*tables, pd.DataFrame(rows)], ignore_index=True)
        measured = record.evidence()
        changes = ("gain", "gain_low", "gain_high", "kl_change", "kl_change_low", "kl_change_high")
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=data,
            evidence={
                **answers.evidence(record),
                **dict.fromkeys(changes, measured),
                **dict.fromkeys(
                    ("paper_accuracy", "paper_tokens_per_s"),
                    Evidence(kind="paper", source="WindowQuant, Table 8: LLaVA-OneVision-7B on EgoSchema, batch 60, 5 frames"),
                ),
            },
            values=_values(data),
            inputs=[record.input(), paper],
            notes=[
                answers.describe(record, "cache_then_ask", "hard", p.num_frames),
                "Random plans hold the memory of WindowQuant's; with rank so do, up to the first window, the plan that knows which "
                "windows answer and its inverse. Reordering changes no value (reorder_equivalence); what it does to latency is "
                "in reorder_cost.",
            ],
        )


def _key(row: pd.Series) -> str:
    if row["method"] == "rtn":
        return f"int{row['num_bits']}"
    if not row["first_window"]:
        return "no_first_window"
    return str(row["order"]) + (f"_{row['seed']}" if row["order"] == "permuted" else "")


def _variants(record: Record, normalize: str, frames: int) -> pd.DataFrame:
    """Return the variants that were recorded for videos of this length."""
    found = answers.summarised(record, num_frames=frames)
    ours = (found["method"] == "windowquant") & (found["scorer"] == "cosine") & (found["normalize"] == normalize)
    uniform = (found["method"] == "rtn") & (found["granularity"] == "window_channel") & found["num_bits"].isin([2, 4])
    rows = found[(ours & (found["granularity"] == "window_channel")) | uniform].copy()
    rows["variant"] = rows.apply(_key, axis=1)
    return rows.assign(part="answers", num_frames=frames, normalize=normalize)


def _differences(record: Record, normalize: str, frames: int) -> pd.DataFrame:
    """Return every variant against WindowQuant, paired over the questions."""
    import pandas as pd

    labels = _variants(record, normalize, frames).set_index("variant")["setting"]
    if "plan" not in labels:
        return pd.DataFrame()
    each = {key: answers.per_question(record, label, num_frames=frames) for key, label in labels.items()}
    rows = []
    for key, mine in each.items():
        if key == "plan":
            continue
        said = {"part": "difference", "variant": key, "num_frames": frames, "normalize": normalize, "n": len(mine)}
        for name, metric in (("gain", "accuracy"), ("kl_change", "kl")):
            mean, low, high = paired.mean_interval(mine[metric] - each["plan"][metric])
            said |= {name: mean, f"{name}_low": low, f"{name}_high": high}
        rows.append(said)
    return pd.DataFrame(rows)


def _values(data: pd.DataFrame) -> dict[str, Value]:
    """Return, for the ledger, each variant's accuracy, KL and bits, and its difference to WindowQuant."""
    found: dict[str, tuple[float, str, str]] = {}
    for row in data[data["part"] == "answers"].to_dict("records"):
        name = f"{row['variant']}_{row['num_frames']:.0f}"
        found[f"accuracy_{name}"] = (row["accuracy"], "share", "accuracy")
        found[f"kl_{name}"] = (row["kl"], "nat", "kl")
        found[f"bits_{name}"] = (row["bits_per_element"], "bit", "bits_per_element")
    for row in data[data["part"] == "difference"].to_dict("records"):
        for column, unit in (("gain", "share"), ("kl_change", "nat")):
            for end in ("", "_low", "_high"):
                found[f"{column}_{row['variant']}_{row['num_frames']:.0f}{end}"] = (row[column + end], unit, column + end)
    return gpu_records.stated(found)
