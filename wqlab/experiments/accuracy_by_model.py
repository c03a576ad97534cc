"""Full precision against WindowQuant per model and benchmark, measured and printed (WindowQuant, Tables 1 and 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wqlab.experiments import Experiment, Parameters, answers, gpu_records
from wqlab.models.shipped import POCKET_VLM
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

_WITH = " + WindowQuant"
#: What was recorded: (protocol, split, frames) -> the benchmark's name in the figure.
_BENCHMARKS = {
    ("cache_then_ask", "easy", 32): "easy, 32 frames", ("cache_then_ask", "hard", 32): "hard, 32 frames",
    ("cache_then_ask", "hard", 100): "hard, 100 frames", ("paper_literal", "hard", 32): "hard, paper's protocol",
    ("multi_turn", "hard", 32): "hard, second question",
}  # fmt: skip
#: Its row with WindowQuant repeats Table 1, so that it has nothing to do with the row above it.
_GARBLED = ("windowquant_table2", "Qwen2-VL")
_PAPER = ("paper_accuracy_fp16", "paper_accuracy", "paper_gain")


class AccuracyByModelParameters(Parameters):
    """Parameters of `accuracy_by_model`.

    Parameters
    ----------
    normalize : {"none", "minmax", "rank"}
        How similarities reach the thresholds; ``none`` is the paper's literal reading.
    gpu : str
        Whose record of answers.
    """

    normalize: Literal["none", "minmax", "rank"] = Field("none", description="how similarities reach the thresholds")
    gpu: str = Field("h200", description="whose record of answers")


@register("stem", "accuracy_by_model")
class AccuracyByModel(Experiment[AccuracyByModelParameters]):
    """The pocket VLM's recorded answers, and the printed accuracies of the paper's models."""

    stem = "accuracy_by_model"
    title = "Full precision and WindowQuant, model by model"
    paper = "WindowQuant, Sect. 4.2, Tables 1 and 2"
    Parameters = AccuracyByModelParameters

    def run(self, parameters: AccuracyByModelParameters) -> Result:
        """Compute a table of two parts.

        Returns
        -------
        Result
            ``part == "recorded"``: per ``benchmark`` of the pocket VLM the columns of `wqlab.experiments.answers.summarised` for
            WindowQuant at alpha 2. ``part == "paper"``: per ``model`` and ``benchmark``, ``paper_accuracy_fp16``,
            ``paper_accuracy`` and ``paper_gain`` in points; ``garbled`` where both cells cannot be of one column.

        Raises
        ------
        MissingPartError
            When the answers were not recorded on that GPU.
        """
        import pandas as pd

        p = parameters
        record = answers.needed(p.gpu)
        recorded = _recorded(record, p.normalize)
        printed, inputs = [], [record.input()]
        for table in ("windowquant_table1", "windowquant_table2"):
            cells, source = gpu_records.printed(table)
            inputs.append(source)
            printed += [
                {
                    "model": row, "benchmark": ("MVBench, " if table.endswith("2") else "") + column, "paper_accuracy_fp16": value,
                    "paper_accuracy": cells[row + _WITH, column], "paper_gain": cells[row + _WITH, column] - value,
                    "garbled": (table, row) == _GARBLED,
                }
                for (row, column), value in cells.items()
                if (row + _WITH, column) in cells
            ]  # fmt: skip
        data = pd.concat([recorded.assign(part="recorded"), pd.DataFrame(printed).assign(part="paper")], ignore_index=True)
        paper = Evidence(kind="paper", source="WindowQuant, Tables 1 and 2, columns as printed; protocol and answers not stated")
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=data,
            evidence={**answers.evidence(record), **dict.fromkeys(_PAPER, paper)},
            values=_values(recorded, data[data["part"] == "paper"]),
            inputs=inputs,
            notes=[
                f"{POCKET_VLM} on PocketBench, fresh stream, alpha 2, normalize {p.normalize}; paired intervals.",
                "Nothing was measured on the paper's models: their checkpoints (7B and 8B) are on a hub that was not reachable "
                "where this was recorded, and PocketBench asks the pocket VLM only.",
                "The header of Table 2 does not fit its columns, which are numbered. Its row of Qwen2-VL with WindowQuant repeats "
                "Table 1 (hollow: not comparable, in no value).",
            ],
        )


def _recorded(record: Record, normalize: str) -> pd.DataFrame:
    import pandas as pd

    tables = []
    for (protocol, split, frames), name in _BENCHMARKS.items():
        found = answers.summarised(record, protocol=protocol, split=split, num_frames=frames)
        rows = found[found["setting"] == f"windowquant cosine {normalize} alpha 2"]
        tables.append(rows.assign(model=POCKET_VLM, benchmark=name, protocol=protocol, split=split, num_frames=frames))
    return pd.concat(tables, ignore_index=True)


def _values(recorded: pd.DataFrame, printed: pd.DataFrame) -> dict[str, Value]:
    """Return the gains for the ledger: of each benchmark with its interval, the largest lower limit, and the largest printed."""
    found: dict[str, tuple[float, str, str]] = {}
    for row in recorded.to_dict("records"):
        name = row["benchmark"].replace(", ", "_").replace(" ", "_").replace("'", "")
        for end in ("", "_low", "_high"):
            found[f"gain_{name}{end}"] = (row[f"accuracy_difference{end}"], "share", f"accuracy_difference{end}")
        found[f"accuracy_{name}"] = (row["accuracy"], "share", "accuracy")
        found[f"accuracy_fp16_{name}"] = (row["accuracy_fp16"], "share", "accuracy_fp16")
    found["largest_sure_gain"] = (float(recorded["accuracy_difference_low"].max()), "share", "accuracy_difference_low")
    found["largest_gain"] = (float(recorded["accuracy_difference"].max()), "share", "accuracy_difference")
    gains = printed.loc[~printed["garbled"].astype(bool), ["benchmark", "paper_gain"]]
    first = gains.loc[~gains["benchmark"].str.startswith("MVBench"), "paper_gain"]
    found["largest_printed_gain"] = (float(gains["paper_gain"].max()), "points", "paper_gain")
    found["largest_printed_gain_table1"] = (float(first.max()), "points", "paper_gain")
    return gpu_records.stated(found)
