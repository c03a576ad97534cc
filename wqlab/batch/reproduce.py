"""Run every notebook, several at a time if asked; a run that was interrupted is continued by the next one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from wqlab import experiments, paths, records
from wqlab.batch.notebooks import execute, notebook_path
from wqlab.batch.save import SUFFIXES
from wqlab.errors import WqlabError
from wqlab.profile import environment

log = logging.getLogger(__name__)

#: Called with (stem, event, detail): event is ``kept``, ``started``, ``finished`` or ``failed``; ``planned`` comes first,
#: with how many.
Listener = Callable[[str, str, str], None]
Fetching = Callable[[], AbstractContextManager[Callable[[str, int, int], None] | None]]


@dataclass
class Report:
    """What a run did: stems finished now, stems kept from the interrupted run before, and errors by stem."""

    out: Path
    finished: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, WqlabError] = field(default_factory=dict)


class _Journal:
    """``.reproduce.json`` in the output folder: which stems of an unfinished run are done. Removed when a run is complete."""

    def __init__(self, out: Path, stems: Sequence[str], quick: bool) -> None:
        self.path = out / ".reproduce.json"
        # Figures of older code or of another quick mode must not be kept.
        self.key = {"code": fingerprint(), "quick": quick}
        self.stems = list(stems)
        self.done: list[str] = []
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # no journal, or one damaged by the kill: start over
            before = {}
        if isinstance(before, dict) and before.get("key") == self.key:
            self.done = [s for s in before.get("done", []) if s in self.stems and _whole(out, s)]

    def finish(self, stem: str) -> None:
        self.done.append(stem)
        paths.write_text(self.path, records.dump_json({"key": self.key, "done": self.done}))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def fingerprint() -> str:
    """Return a sha256 over the package's source and the notebooks: what decides the content of a figure."""
    digest = hashlib.sha256()
    package = Path(experiments.__file__).parents[1]
    files = sorted([*package.rglob("*.py"), *package.rglob("*.mplstyle"), *paths.shipped("notebooks").glob("*.ipynb")])
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _stop_kernels() -> None:
    """End the kernels of this process: they run in sessions of their own, so Ctrl-C at the terminal does not reach them."""
    for child in psutil.Process().children(recursive=True):
        try:
            if any("ipykernel" in word for word in child.cmdline()):
                child.kill()
        except psutil.NoSuchProcess:
            continue


def _whole(out: Path, stem: str) -> bool:
    """Tell whether all files of a figure are there and match the checksums in its sidecar."""
    try:
        expected: dict[str, str] = json.loads((out / f"{stem}.json").read_text(encoding="utf-8"))["files"]
        return all(records.sha256_file(out / f"{stem}.{suffix}") == value for suffix, value in expected.items())
    except (OSError, ValueError, KeyError):
        return False


def reproduce(
    stems: Sequence[str] = (),
    out: Path | str = "figures",
    quick: bool = False,
    jobs: int = 1,
    listener: Listener | None = None,
    fetching: Fetching = lambda: nullcontext(None),
) -> Report:
    """Execute the notebooks of `stems` and put their figures into `out`.

    One failing notebook does not stop the others. Figures of a run that was killed or failed are kept by the next run with the
    same code, which makes only what is missing.

    Parameters
    ----------
    stems : sequence of str
        Empty: every stem that has a notebook.
    out : path
        Output folder.
    quick : bool
        Smaller inputs; every sidecar says so.
    jobs : int
        Notebooks at a time, at least 1. The cores are shared out among them.
    listener : callable, optional
        Told about progress.
    fetching : callable
        Returns a context manager that gives the progress callback of `wqlab.models.fetch.fetch`.

    Returns
    -------
    Report

    Raises
    ------
    UnknownNameError
        For an unknown stem; nothing was run.
    OutputError
        When `out` cannot be written.
    """
    tell = listener or (lambda stem, event, detail: log.info("%s %s %s", stem, event, detail))
    chosen = list(dict.fromkeys(stems)) or [s for s in experiments.stems() if (paths.shipped("notebooks") / f"{s}.ipynb").is_file()]
    for stem in chosen:
        experiments.get(stem)
        notebook_path(stem)
    folder = paths.output_dir(out).resolve()
    journal = _Journal(folder, chosen, quick)
    report = Report(out=Path(out), kept=list(journal.done))
    tell("", "planned", str(len(chosen)))
    for stem in report.kept:
        tell(stem, "kept", "finished by the interrupted run before this one")
    given: dict[str, Any] = {"quick": True} if quick else {}

    def one(stem: str) -> None:
        tell(stem, "started", "")
        execute(stem, folder, given)

    todo = []
    for stem in (s for s in chosen if s not in report.kept):
        try:
            with fetching() as progress:
                experiments.fetch_parts(stem, given, progress)
        except WqlabError as error:  # the stems that need nothing are still made
            report.failed[stem] = error
            tell(stem, "failed", str(error))
        else:
            todo.append(stem)
    if jobs > 1:
        # Kernels inherit the environment; without a share each would start one thread per core.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, environment.hardware()["cores"] // jobs)))
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        running = {pool.submit(one, stem): stem for stem in todo}
        try:
            for future in as_completed(running):
                stem = running[future]
                try:
                    future.result()
                except WqlabError as error:
                    report.failed[stem] = error
                    tell(stem, "failed", str(error))
                else:
                    report.finished.append(stem)
                    journal.finish(stem)
                    tell(stem, "finished", ", ".join(f"{stem}{s}" for s in SUFFIXES))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            _stop_kernels()
            raise
    if not report.failed:
        journal.close()
    return report
