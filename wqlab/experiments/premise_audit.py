"""Does the window search find the windows that answer, and would a plan that knows them be better (WindowQuant, Sect. 3.2.1)?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from wqlab.bench.premise_audit import FRESH
from wqlab.experiments import Experiment, Parameters, gpu_records, scorer_audit
from wqlab.registry import register
from wqlab.types import Result, Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd


class PremiseAuditParameters(Parameters):
    """Parameters of `premise_audit`.

    Parameters
    ----------
    split : {"hard", "easy"}
        Which questions of PocketBench are drawn.
    gpu : str
        Whose records.
    """

    split: Literal["hard", "easy"] = Field("hard", description="which questions are drawn")
    gpu: str = Field("h200", description="whose records of the audit and of answers")


@register("stem", "premise_audit")
class PremiseAudit(Experiment[PremiseAuditParameters]):
    """Scorers against PocketBench's ground truth, and the answers under plans at equal memory, from two records."""

    stem = "premise_audit"
    title = "Which windows answer, who finds them, and whether it helps to know"
    paper = "WindowQuant, Sect. 1, 3.2.1 and 4.3 (the premise behind Eq. 8 and Table 8)"
    Parameters = PremiseAuditParameters

    def run(self, parameters: PremiseAuditParameters) -> Result:
        """Compute a table of five parts.

        Returns
        -------
        Result
            The tables of `wqlab.experiments.scorer_audit`: ``part`` is ``scorer`` (`audited`), ``layer`` (`by_layer`) or
            ``task`` (`by_task`) for both splits, ``plan`` (`plans`) or ``difference`` (`differences`) for the one that is drawn.

        Raises
        ------
        UnknownNameError
            For a GPU key that does not exist.
        MissingPartError
            When a record is missing; says how to get it.
        """
        import pandas as pd

        records = scorer_audit.needed(parameters.gpu)
        split = parameters.split
        tables = {
            "scorer": scorer_audit.audited(records), "layer": scorer_audit.by_layer(records),
            "task": scorer_audit.by_task(records), "plan": scorer_audit.plans(records, split),
            "difference": scorer_audit.differences(records, split),
        }  # fmt: skip
        data = pd.concat([table.assign(part=part) for part, table in tables.items()], ignore_index=True)
        audit = records.audit.evidence()
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=data,
            evidence={
                **dict.fromkeys(scorer_audit.AUDITED, audit),
                **dict.fromkeys((*scorer_audit.ANSWERED, *scorer_audit.CHANGES), records.answers.evidence()),
            },
            values=_values(data),
            inputs=[records.audit.input(), records.answers.input()],
            notes=_notes(data, split),
        )


def _values(data: pd.DataFrame) -> dict[str, Value]:
    """Return the numbers for the ledger; those of answers to easy questions end in ``_easy``."""
    found: dict[str, tuple[float, str, str]] = {}
    for row in data[data["part"] == "scorer"].to_dict("records"):
        for name in ("auc", "precision", "gain"):
            for end in ("", "_low", "_high"):
                found[f"{name}_{row['scorer']}_{row['split']}{end}"] = (row[name + end], "1", name + end)
        found[f"base_rate_{row['split']}"] = (row["base_rate"], "1", "base_rate")
        found[f"questions_{row['split']}"] = (float(row["n"]), "questions", "auc")
    for row in data[(data["part"] == "layer") & (data["stream"] == FRESH)].to_dict("records"):
        found[f"auc_layer_{row['layer']:.0f}_{row['split']}"] = (row["auc"], "1", "auc")
    plans = data[data["part"] == "plan"]
    for row in plans.to_dict("records"):
        name = _name(row)
        for metric, unit in (("kl", "nat"), ("accuracy", "share")):
            for end in ("", "_low", "_high"):
                found[f"{metric}_{name}{end}"] = (row[metric + end], unit, metric + end)
        found[f"bits_{name}"] = (row["bits_per_element"], "bit", "bits_per_element")
    for row in data[data["part"] == "difference"].to_dict("records"):
        for metric, unit in (("kl_change", "nat"), ("accuracy_change", "share")):
            for end in ("", "_low", "_high"):
                name = _name(row, f"_to_{row['against']}")
                found[f"{metric}_{name}{end}"] = (row[metric + end], unit, metric + end)
        kl = plans[(plans["split"] == row["split"]) & (plans["num_frames"] == row["num_frames"])].set_index("plan")["kl"]
        if kl[row["against"]] > 0:
            found[f"kl_ratio_{_name(row, '_to_' + row['against'])}"] = (kl[row["plan"]] / kl[row["against"]], "ratio", "kl")
    return gpu_records.stated(found)


def _name(row: Mapping[Any, Any], more: str = "") -> str:
    """Return what a plan's values are called: ``truth_100``, ``truth_to_cosine_100``, ``truth_32_easy``."""
    return f"{row['plan']}{more}_{row['num_frames']:.0f}" + ("_easy" if row["split"] == "easy" else "")


def _notes(data: pd.DataFrame, split: str) -> list[str]:
    """Return what holds, in words that the intervals allow."""
    chosen = data[data["split"] == split]
    scorers = chosen[chosen["part"] == "scorer"].set_index("scorer")
    notes = [
        f"Pocket VLM, PocketBench {split}, 32 frames, windows of 32 tokens: {scorers['n'].iloc[0]:.0f} fresh "
        "questions for which some windows answer and some do not (answers: all questions). 95 % bootstrap intervals over "
        "questions. Attention: of the question's "
        f"tokens; its layers ({_layers(scorers)}) were chosen on a development stream of hard questions."
    ]
    words = ("worse than chance", "better than chance", "no better than chance")
    keys = [key for key in ("cosine", "attention_early", "attention_best") if key in scorers.index]
    said = []
    for key in keys:
        row: Any = scorers.loc[key]
        ranked = scorer_audit.verdict(row["auc_low"] - 0.5, row["auc_high"] - 0.5, *words)
        picked = scorer_audit.verdict(row["gain_low"], row["gain_high"], *words)
        said.append(
            f"{scorer_audit.NAMES[key]}: {ranked} by AUC, {row['auc']:.3f} ({row['auc_low']:.3f} to {row['auc_high']:.3f}); "
            f"{picked} by precision, {row['precision']:.2f} where chance has {row['base_rate']:.2f} ({row['gain']:+.3f}, "
            f"{row['gain_low']:+.3f} to {row['gain_high']:+.3f})"
        )
    notes.append(f"Finding the windows that answer: {'; '.join(said)}.")
    changes = chosen[chosen["part"] == "difference"]
    for frames in sorted(changes["num_frames"].unique()):
        table = changes[changes["num_frames"] == frames].set_index(["plan", "against"])
        pairs = [("cosine", "random"), ("truth", "random"), ("truth", "cosine")]
        pairs += [("attention_early", "cosine"), ("attention_best", "cosine")]
        text = "; ".join(_change(table.loc[pair], *pair) for pair in pairs if pair in table.index)
        notes.append(f"KL at equal memory, {frames:.0f} frames, paired over questions: {text}.")
    notes.append(f"The table has {len(changes)} such differences; no interval is widened for their number.")
    truth = changes[(changes["plan"] == "truth") & (changes["against"] == "random")]
    if len(truth) and (truth["kl_change_high"] >= 0).all():
        notes.append(
            "So a plan that knows which windows answer is not measurably better than a random one: nothing says that they are the "
            "windows whose precision matters most to this model."
        )
    return notes


def _change(row: Any, plan: str, against: str) -> str:
    found = scorer_audit.verdict(row["kl_change_low"], row["kl_change_high"], "lower", "higher", "not told apart")
    short = {"truth": "the answer's windows", "attention_early": "early attention", "attention_best": "best attention"}
    numbers = f"{row['kl_change']:+.3f} ({row['kl_change_low']:+.3f} to {row['kl_change_high']:+.3f})"
    return f"{short.get(plan, plan)} against {against} {numbers}, {found}"


def _layers(scorers: pd.DataFrame) -> str:
    keys = {"attention_early": "early", "attention_best": "best"}
    return ", ".join(f"{name} {scorers['layers'][key]}" for key, name in keys.items() if key in scorers.index)
