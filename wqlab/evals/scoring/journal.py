"""Answers, kept while a run goes on: one that is interrupted is continued by the next one with the same settings."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from wqlab import paths, records

log = logging.getLogger(__name__)

ANSWERS, RUN, RESULT = "answers.jsonl", "run.json", "result.json"


class Answer(BaseModel):
    """One question, scored with every setting of the run.

    Parameters
    ----------
    index : int
        Of the item in its stream.
    task : str
        Its task type.
    answer : int
        The correct option.
    log_probs : dict of str to list of float
        Setting -> log-probability of each option.
    num_bytes : dict of str to int
        Setting -> bytes that hold the visual tokens' K and V (all tokens' where text is encoded too), metadata included.
    num_elements : dict of str to int
        Setting -> numbers in the K and V of those tokens.
    seconds : float
        The question's share of its batch's time, all settings together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    index: int
    task: str
    answer: int
    log_probs: dict[str, list[float]]
    num_bytes: dict[str, int]
    num_elements: dict[str, int]
    seconds: float


class Journal:
    """The answers of one run, in memory and, given a folder, in ``answers.jsonl``, which is never half written.

    Parameters
    ----------
    key : dict
        All that decides the answers, JSON-ready; written beside them as ``run.json``.
    labels : sequence of str
        The settings that every answer must hold.
    out : Path, optional
        Holds one folder per key. None: nothing is kept.

    Attributes
    ----------
    answers : dict of int to Answer
        By index.
    folder : Path, optional
        Of this run.
    notes : list of str
        What was wrong with the file, if anything.

    Raises
    ------
    OutputError
        When the folder cannot be written.
    """

    def __init__(self, key: dict[str, Any], labels: Sequence[str], out: Path | None = None) -> None:
        self.labels = set(labels)
        self.answers: dict[int, Answer] = {}
        self.notes: list[str] = []
        self.folder: Path | None = None
        if out is not None:
            text = records.dump_json(key)
            self.folder = paths.output_dir(out / f"{key['benchmark']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
            paths.write_text(self.folder / RUN, text)
            self._read(self.folder / ANSWERS)

    def add(self, answers: Iterable[Answer]) -> None:
        """Add answers and write the file anew; killed in between, it holds what it held before."""
        self.answers |= {answer.index: answer for answer in answers}
        if self.folder is not None:
            self._write(self.folder / ANSWERS)

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        damaged = 0
        for line in path.read_bytes().splitlines():
            try:
                answer = Answer.model_validate_json(line)
            except ValidationError:
                damaged += 1
                continue
            if answer.log_probs.keys() == answer.num_bytes.keys() == answer.num_elements.keys() == self.labels:
                self.answers[answer.index] = answer
            else:
                damaged += 1
        if damaged:
            aside = _copy_aside(path)
            self._write(path)
            note = f"{path}: {damaged} damaged lines; the file is kept as {aside.name} and their questions are answered again"
            log.warning(note)
            self.notes.append(note)

    def _write(self, path: Path) -> None:
        ordered = (self.answers[index] for index in sorted(self.answers))
        paths.write_text(path, "".join(answer.model_dump_json() + "\n" for answer in ordered))


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json`` of a run; one that is there and damaged is kept beside it and named in the result's ``notes``."""
    path = folder / RESULT
    try:
        json.loads(path.read_bytes())
    except FileNotFoundError:
        pass
    except ValueError:
        result["notes"].append(f"{path} was damaged; it is kept as {_copy_aside(path).name}")
        log.warning(result["notes"][-1])
    paths.write_text(path, records.dump_json(result))


def _copy_aside(path: Path) -> Path:
    """Copy a damaged file to the first free ``<name>.damaged-<number>`` beside it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    shutil.copyfile(path, aside)
    return aside
