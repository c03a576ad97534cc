"""PocketBench on a card: what it asks, what the pocket VLM answers, how that was trained, and what round to nearest does to it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from wqlab import records
from wqlab.errors import DamagedFileError, MissingPartError, ParameterError, RecordError, UnknownNameError
from wqlab.evals import paired
from wqlab.experiments import Experiment, Parameters, slider
from wqlab.models import shipped
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

FULL = "fp16"
_LOG_PROBS = [f"log_prob_{i}" for i in range(4)]
_METRICS = ("accuracy", "accuracy_difference", "kl", "flip_rate", "margin_difference")
_UNITS = {"accuracy_loss": "share", "kl": "nat", "flip_rate": "share", "margin_difference": "nat"}
#: What the ledger's values are about, whatever the figure shows: protocol, split and frames.
_JUDGED = ("cache_then_ask", "hard", 32)
#: Frames of a sample, and the factor by which they are shrunk.
_SHOWN, _SHRINK = 3, 2


class PocketBenchCardParameters(Parameters):
    """Parameters of `pocketbench_card`. The samples, and the panels about quantization, follow split, frames and protocol.

    Parameters
    ----------
    split : {"hard", "easy"}
        Of PocketBench.
    num_frames : {32, 100}
        Frames per video.
    protocol : {"cache_then_ask", "paper_literal", "multi_turn"}
        What was read when the cache was quantized; the last two were recorded on the hard split with 32 frames.
    example : int
        Which video of each task is shown.
    curve : {"token_accuracy", "loss"}
        What the training panel shows; both are in the table.
    gpu : str
        Whose record of answers.
    """

    split: Literal["hard", "easy"] = Field("hard", description="split of PocketBench")
    num_frames: Literal[32, 100] = Field(32, description="frames per video")
    protocol: Literal["cache_then_ask", "paper_literal", "multi_turn"] = Field(
        "cache_then_ask", description="what was read when the cache was quantized"
    )
    example: int = slider(0, 0, 19, 1, "which video of each task is shown", ge=0, le=1000)
    curve: Literal["token_accuracy", "loss"] = Field("token_accuracy", description="what the training panel shows")
    gpu: str = Field("h200", description="whose record of answers")


@lru_cache(maxsize=2)
def _recorded(gpu: str) -> Record:
    try:
        return records.read("pocketbench", gpu)
    except UnknownNameError as error:
        if error.kind == "GPU":
            raise
        raise MissingPartError(
            f"there is no record of PocketBench's answers on {gpu}: take data/recorded/{gpu}/pocketbench.* from the project's "
            "repository, or measure them on such a GPU: wqlab bench pocketbench"
        ) from error


class Training(NamedTuple):
    """The pocket VLM's training: its log, all steps that made the weights, where the log comes from, and the weights' sha256."""

    log: pd.DataFrame
    steps: int
    evidence: Evidence
    source: Input
    weights: str


@lru_cache(maxsize=1)
def _training() -> Training:
    import pandas as pd

    weights = shipped.weights_path()
    path, said = weights.with_name("training.csv"), shipped.sidecar(weights)
    if not path.is_file() or not said:
        raise MissingPartError(
            f"{path.name} or {weights.with_suffix('.json').name} is not in {path.parent}: take both from the project's repository, "
            f"or train the pocket VLM: {shipped.TRAIN} (needs a GPU)"
        )
    name = f"data/models/{shipped.POCKET_VLM}/{path.name}"
    try:
        log, ran = pd.read_csv(path), said["provenance"]
        # Runs that went on from finished weights are numbered where their logs were joined.
        log = (log if "run" in log else log.assign(run=1))[
            ["run", "step", "seconds", "kind", "num_frames", "steps", "loss", "token_accuracy"]
        ]
        runs = [said]
        while runs[-1].get("started_from"):
            runs.append(runs[-1]["started_from"])
        evidence = Evidence(
            kind="recorded",
            source=ran["command"],
            hardware=(ran["hardware"]["gpus"] or [ran["hardware"]["cpu"]])[0],
            file=name,
            commit=ran["git_commit"],
            date=ran["date"][:10],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} or the JSON of its weights lacks {error}; restore both from git") from error
    return Training(
        log, sum(int(run["step"]) for run in runs), evidence, Input(name, records.sha256_file(path)), str(said["sha256"])
    )


@lru_cache(maxsize=8)
def _asked(gpu: str, protocol: str, split: str, num_frames: int) -> pd.DataFrame:
    """Return the record's rows of one way of asking, by setting and question.

    Raises
    ------
    ParameterError
        When it was not recorded; says what was.
    """
    data = _recorded(gpu).data
    keys = ["protocol", "split", "num_frames"]
    rows = data[~data["blind"] & (data[keys] == [protocol, split, num_frames]).all(axis=1)]
    if rows.empty:
        known = data.loc[~data["blind"], keys].drop_duplicates().itertuples(index=False)
        raise ParameterError(
            f"protocol = {protocol} was not recorded on the {split} split with {num_frames} frames; "
            f"recorded: {', '.join(f'{p} {s} {n}' for p, s, n in known)}"
        )
    return rows.sort_values(["setting", "index"])


@lru_cache(maxsize=4)
def _accuracy(gpu: str, resamples: int) -> pd.DataFrame:
    """Return the accuracy in full precision, over all tasks and per task, for each split and length, and without seeing."""
    import pandas as pd

    data = _recorded(gpu).data
    full = data[(data["setting"] == FULL) & (data["protocol"] == "cache_then_ask")]
    keys = ["split", "num_frames", "blind", "task"]
    rows = []
    for group in (full.assign(task="all"), full):
        for key, found in group.groupby(keys):
            mean, low, high = paired.mean_interval(found["chosen"] == found["answer"], resamples)
            rows.append((*key, "accuracy", len(found), mean, low, high))
    return pd.DataFrame(rows, columns=[*keys, "metric", "n", "value", "low", "high"]).assign(
        panel="accuracy", setting=FULL, protocol="cache_then_ask"
    )


@lru_cache(maxsize=16)
def _against_full(gpu: str, protocol: str, split: str, num_frames: int, resamples: int) -> pd.DataFrame:
    """Return each metric of each setting, paired with full precision question by question."""
    import pandas as pd

    rows = _asked(gpu, protocol, split, num_frames)
    full = rows.loc[rows["setting"] == FULL, _LOG_PROBS].to_numpy()
    tables = []
    for setting, mine in rows.groupby("setting"):
        found = paired.per_question(full, mine[_LOG_PROBS].to_numpy(), mine["answer"].to_numpy())
        means = [(metric, len(mine), *paired.mean_interval(found[metric], resamples)) for metric in _METRICS]
        same = {name: mine[name].iloc[0] for name in ("num_bits", "granularity", "protocol", "split", "num_frames")}
        bits = float(mine["bits_per_element"].mean())
        table = pd.DataFrame(means, columns=["metric", "n", "value", "low", "high"])
        tables.append(table.assign(**same, setting=setting, bits_per_element=bits, task="all", blind=False))
    return pd.concat(tables).assign(panel="quantized")


@lru_cache(maxsize=16)
def _samples(gpu: str, protocol: str, split: str, num_frames: int, example: int) -> tuple[pd.DataFrame, Any, str]:
    """Return a video per task: its question with every setting's answer, its frames [tasks, frames, h, w, 3], and its source."""
    import pandas as pd

    from wqlab.evals import pocketbench

    recorded = _asked(gpu, protocol, split, num_frames)
    seed, tasks = int(recorded["seed"].iloc[0]), len(pocketbench.task_names())
    first = example * tasks
    items = list(pocketbench.items(split, seed, num_frames, start=first, stop=first + tasks))
    rows, shown = [], []
    for item in items:
        question = item.questions[0]
        answered = recorded[recorded["index"] == item.index]
        if answered.empty:
            raise ParameterError(
                f"example = {example} is refused: {recorded['index'].max() // tasks + 1} videos of each task were asked"
            )
        if (answered["answer"] != question.answer).any():
            raise RecordError(
                f"the record was measured with PocketBench {recorded['generator'].iloc[0]}, whose questions are others than those "
                "of this version; measure again with: wqlab bench pocketbench"
            )
        at = _around(question.frames)
        scene = item.scene
        part = replace(scene, sprites=scene.sprites[:, at], backgrounds=scene.backgrounds[at], weather=scene.weather[at])
        shown.append(replace(item, num_frames=_SHOWN, scene=part))
        same = {
            "task": question.task, "index": item.index, "question": question.text,
            "right_answer": question.options[question.answer],
            "wrong_answers": ", ".join(text for i, text in enumerate(question.options) if i != question.answer),
            "frames": ", ".join(str(i + 1) for i in at),
        }  # fmt: skip
        rows += [
            {**same, "setting": r["setting"], "num_bits": r["num_bits"], "granularity": r["granularity"],
             "chosen": question.options[r["chosen"]]}
            for r in answered.to_dict("records")
        ]  # fmt: skip
    frames = pocketbench.draw(shown).numpy()
    small = frames.reshape(*frames.shape[:3], frames.shape[3] // _SHRINK, _SHRINK, -1, _SHRINK).mean(axis=(4, 6))
    source = (
        f"drawn by PocketBench {pocketbench.VERSION}, {split} split, seed {seed}, videos {first} to {first + tasks - 1} "
        f"of {num_frames} frames"
    )
    table = pd.DataFrame(rows).assign(panel="samples", protocol=protocol, split=split, num_frames=num_frames, blind=False)
    return table, small.transpose(0, 1, 3, 4, 2).round().astype(np.uint8), source


def _around(frames: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return `_SHOWN` frames: the first, middle and last that answer the question, with neighbours where these are too few."""
    low, high = min(frames), max(frames)
    while high - low + 1 < _SHOWN:  # what was before first: then a change is seen
        low, high = (low - 1, high) if low > 0 else (low, high + 1)
    return np.linspace(low, high, _SHOWN).round().astype(np.int64)


@register("stem", "pocketbench_card")
class PocketBenchCard(Experiment[PocketBenchCardParameters]):
    """Reads recorded answers and the training log, and draws videos; no model runs."""

    stem = "pocketbench_card"
    title = "PocketBench and the pocket VLM"
    paper = "PocketBench (this project's benchmark)"
    Parameters = PocketBenchCardParameters
    live = False

    def parts(self, parameters: PocketBenchCardParameters) -> list[str]:
        """Return the clips, whose frames are backgrounds."""
        return ["clips"]

    def run(self, parameters: PocketBenchCardParameters) -> Result:
        """Compute four panels in one table.

        Returns
        -------
        Result
            ``panel == "samples"``: per task and setting ``question``, ``right_answer``, ``wrong_answers``, ``frames`` (those shown,
            counted from 1) and ``chosen``. ``"accuracy"``: ``value``, ``low``, ``high`` per split, length and task; ``blind`` where
            the visual tokens were zeroed. ``"training"``: ``loss`` (nats) and ``token_accuracy`` of the ``steps`` of a ``kind``
            before ``step``; a second ``run`` goes on from the weights of the first. ``"quantized"``: each ``metric`` per setting,
            with ``bits_per_element``. The pictures ``frames`` belong to the samples, task by task.
        """
        import pandas as pd

        p = parameters
        resamples = 200 if p.quick else 2000
        record, training = _recorded(p.gpu), _training()
        samples, frames, source = _samples(p.gpu, p.protocol, p.split, p.num_frames, p.example)
        accuracy = _accuracy(p.gpu, resamples)
        quantized = _against_full(p.gpu, p.protocol, p.split, p.num_frames, resamples)
        data = pd.concat([samples, accuracy, training.log.assign(panel="training"), quantized], ignore_index=True)
        data = data[["panel", *(name for name in data.columns if name != "panel")]]
        whole = ("index", "num_frames", "num_bits", "n", "step", "steps", "run")
        data = data.astype(dict.fromkeys(whole, "Int64") | {"blind": "boolean"})
        drawn, answered = Evidence(kind="simulated", source=source), record.evidence()
        return Result(
            stem=self.stem,
            parameters=p.model_dump(),
            data=data,
            evidence={
                **dict.fromkeys(("question", "right_answer", "wrong_answers", "frames"), drawn),
                **dict.fromkeys(("chosen", "value", "low", "high", "bits_per_element"), answered),
                **dict.fromkeys(("loss", "token_accuracy", "seconds"), training.evidence),
            },
            values=_values(p.gpu, resamples),
            inputs=[record.input(), training.source, _generator()],
            notes=_notes(record, training),
            pictures={"frames": frames},
        )


@lru_cache(maxsize=4)
def _values(gpu: str, resamples: int) -> dict[str, Value]:
    """Return the numbers for findings and ledger, the same whatever the figure shows."""
    accuracy = _accuracy(gpu, resamples)
    values = {}
    for (split, num_frames, blind), rows in accuracy.groupby(["split", "num_frames", "blind"]):
        name = f"{split}_{num_frames}"
        overall, tasks = rows[rows["task"] == "all"].iloc[0], rows[rows["task"] != "all"]
        values[f"{'blind_' if blind else ''}accuracy_{name}"] = Value(float(overall["value"]), "share", "value")
        if not blind:
            values[f"min_task_accuracy_{name}"] = Value(float(tasks["value"].min()), "share", "value")
    judged = _against_full(gpu, *_JUDGED, resamples)
    quantized = judged[judged["setting"] != FULL]
    for row in quantized.to_dict("records"):
        name, metric, (mean, low, high) = (
            f"int{row['num_bits']}_{row['granularity']}",
            row["metric"],
            (row["value"], row["low"], row["high"]),
        )
        values[f"bits_per_element_{name}"] = Value(row["bits_per_element"], "bit", "bits_per_element")
        if metric == "accuracy":
            values[f"accuracy_{name}"] = Value(mean, "share", "value")
            continue
        if metric == "accuracy_difference":  # a loss is easier to speak of
            metric, (mean, low, high) = "accuracy_loss", (-mean, -high, -low)
        for suffix, value, column in (("", mean, "value"), ("_low", low, "low"), ("_high", high, "high")):
            values[f"{metric}_{name}{suffix}"] = Value(value, _UNITS[metric], column)
    log = _training().log
    values["training_minutes"] = Value(float(log["seconds"].max()) / 60, "min", "seconds")
    last = log[log["kind"] == "questions"].iloc[-1]
    values["training_questions_token_accuracy"] = Value(float(last["token_accuracy"]), "share", "token_accuracy")
    return values


@lru_cache(maxsize=1)
def _generator() -> Input:
    from wqlab.evals import pocketbench

    return Input(f"PocketBench {pocketbench.VERSION} generator", pocketbench.generator_hash())


def _per_task(record: Record) -> list[tuple[int, int]]:
    """Return the lengths of the main protocol's videos, each with its number of questions per task."""
    data = record.data
    full = data[(data["setting"] == FULL) & (data["protocol"] == "cache_then_ask") & ~data["blind"]]
    per_task = full.groupby(["num_frames", "split", "task"], as_index=False).size().groupby("num_frames")["size"].min()
    return list(zip(per_task.index.tolist(), per_task.tolist(), strict=True))


def _notes(record: Record, training: Training) -> list[str]:
    """Return what a reader must know; also where answers, weights, log and generator do not belong together."""
    from wqlab.evals import pocketbench

    notes = [
        "Intervals: 95 %, bootstrap over the questions; against FP16 the differences are paired.",
        f"Questions per task: {', '.join(f'{n} with {frames} frames' for frames, n in _per_task(record))}.",
        "Blind: visual tokens zeroed. Test videos have backgrounds, words and combinations that training never showed.",
    ]
    logged = int(training.log["step"].max())
    if logged != training.steps:
        notes.append(f"The log covers {logged:,} of {training.steps:,} training steps.")
    answered, shipped_now = str(record.data["weights"].iloc[0]), training.weights[:12]
    if answered != shipped_now:
        notes.append(f"The answers are those of other weights ({answered}) than the ones shipped ({shipped_now}).")
    asked, here = str(record.data["generator"].iloc[0]), f"{pocketbench.VERSION} {_generator().sha256[:12]}"
    if asked != here:
        notes.append(f"The questions were drawn by generator {asked}, the samples by {here}.")
    return notes
