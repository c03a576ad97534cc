"""Every bench on one's own GPU, one after another, and side by side: ours here, ours recorded, theirs, and the papers' numbers.

Each bench runs in a process of its own: what one does to the GPU, an illegal access even, cannot reach the next, and all of its
memory is given back.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wqlab import bench, claims, paths, records, registry
from wqlab.errors import MissingPartError, ParameterError, RecordError, UnknownNameError, WqlabError
from wqlab.profile import environment

if TYPE_CHECKING:
    from rich.table import Table

#: The GPU whose records travel with the package.
RECORDED = "h200"
#: Called with (bench, event, detail), as `wqlab.batch.reproduce` calls its listener.
Listener = Callable[[str, str, str], None]
_JOURNAL = ".measure.json"

#: Runs one bench and says how it ended. The parent's plug-in packages are this process's too.
_CHILD = """
import json, sys
name, out, quick, places, packages = json.loads(sys.argv[1])
sys.path[:] = places
from wqlab import bench, registry
from wqlab.errors import LimitError, WqlabError
for package in packages:
    registry.add_package("bench", package)
try:
    bench.run(name, out, quick=quick)
except LimitError as error:
    ended = ["outside", str(error)]
except WqlabError as error:
    ended = ["failed", str(error)]
except Exception as error:
    ended = ["failed", f"{type(error).__name__}: {error}"]
else:
    ended = ["measured", ""]
print("\\n" + json.dumps(ended))
"""


@dataclass(frozen=True)
class Machine:
    """What is measured on.

    Parameters
    ----------
    gpu : str
        Its name, or the CPU's where there is no GPU.
    key : str
        Its folder among the records.
    architecture : str
        For example ``sm_90``; empty without a GPU.
    tested : bool
        Whether the CUDA kernels' tests have passed on that architecture.
    """

    gpu: str
    key: str
    architecture: str
    tested: bool


@dataclass
class Report:
    """What a run did.

    Parameters
    ----------
    machine : Machine
        Where.
    folder : Path
        Of the records.
    measured, kept : list of str
        Benches that ran now, and those whose records were there already.
    failed : dict of str to str
        Why a bench has no record, or which limit its record breaks.
    left_out : list of str
        Benches that measure nothing of a GPU, and were not named.
    rows : list of dict
        The table: bench, metric, unit, ours, recorded, theirs, paper, claim; None where there is no number.
    """

    machine: Machine
    folder: Path
    measured: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        machine = vars(self.machine)
        return {**machine, "recorded": RECORDED, **{n: v for n, v in vars(self).items() if n not in ("machine", "folder")}}


def measure(
    only: Sequence[str] = (),
    out: Path | str = "measured",
    resume: bool = False,
    quick: bool = False,
    listener: Listener | None = None,
) -> Report:
    """Run benches one after another; a failing one does not stop the others, and each record is written when its bench ends.

    Parameters
    ----------
    only : sequence of str
        Benches; empty: every registered one that measures the GPU.
    out : path
        Folder that holds one folder per GPU key. Not that of the records which travel with the package: they are compared with.
    resume : bool
        Keep a record that the same code, packages and GPU made.
    quick : bool
        Smaller; the numbers mean nothing.
    listener : callable, optional
        Told about progress.

    Raises
    ------
    UnknownNameError, OutputError
        For an unknown bench, or a folder that cannot be written; nothing was measured.
    MissingPartError
        Without a GPU, unless benches are named or the run is quick.
    ParameterError
        When `out` holds the records that the package carries.
    """
    known = registry.names("bench")
    for name in only:
        if name not in known:
            raise UnknownNameError("bench", name, known)
    folder = paths.output_dir(out)
    if folder.resolve() == records.root().resolve():
        raise ParameterError(f"--out {out} holds the records that are compared with; name another folder")
    here = machine()
    if here.key == "cpu" and not only and not quick:
        raise MissingPartError(
            "wqlab measure runs the benches on a CUDA GPU, and torch finds none; name some with --only, or try it with --quick"
        )
    tell = listener or (lambda name, event, detail: None)
    report = Report(here, folder)
    journal = _Journal(folder / here.key / _JOURNAL)
    chosen = list(dict.fromkeys(only)) or [name for name in known if bench.get(name).uses_gpu]
    report.left_out = [] if only else [name for name in known if name not in chosen]
    tell("", "planned", str(len(chosen)))
    for name in chosen:
        if resume and journal.keeps(name, here.key, folder, quick):
            report.kept.append(name)
            tell(name, "kept", "the same code, packages and GPU made its record")
            continue
        tell(name, "started", "")
        ended, why = _run(name, folder, quick)
        if ended == "measured":
            report.measured.append(name)
            journal.finish(name)
            tell(name, "finished", str(records.read(name, here.key, folder).path))
        else:
            report.failed[name] = why
            tell(name, "failed", why)
        if ended != "failed":
            report.rows += compare(name, here.key, folder)
    for name in report.kept:
        report.rows += compare(name, here.key, folder)
    order = {name: i for i, name in enumerate(chosen)}
    report.rows.sort(key=lambda row: order[row["bench"]])
    return report


def machine() -> Machine:
    """Return what this machine measures on."""
    import torch

    from wqlab.ops.mixed_decode import cuda_kernel

    environment.hardware.cache_clear()  # asked before torch was imported, it knows no GPU
    if not torch.cuda.is_available():
        return Machine(environment.hardware_line(), environment.gpu_key(), "", False)
    major, minor = torch.cuda.get_device_capability()
    return Machine(environment.hardware_line(), environment.gpu_key(), f"sm_{major}{minor}", (major, minor) in cuda_kernel.TESTED)


def compare(name: str, key: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one bench's table: its headlines here, those of the record that travels along, and the papers' numbers."""
    one = bench.get(name)
    try:
        recorded = {h.metric: h.ours for h in one.headlines(records.read(name, RECORDED).data)}
    except (UnknownNameError, RecordError, KeyError):  # never recorded there, or by older code with other columns
        recorded = {}
    printed = {claim.id: (claim.value, claim.unit) for claim in claims.ledger()}
    rows = []
    for headline in one.headlines(records.read(name, key, folder).data):
        value, unit = printed.get(headline.claim or "", (None, None))
        rows.append(
            {
                "bench": name, "metric": headline.metric, "unit": headline.unit, "ours": _finite(headline.ours),
                "recorded": _finite(recorded.get(headline.metric)), "theirs": _finite(headline.theirs),
                "paper": value if unit == headline.unit else None, "claim": headline.claim,
            }
        )  # fmt: skip
    return rows


def table(report: Report) -> Table:
    """Return the comparison for a terminal."""
    from rich.table import Table

    here = report.machine
    mark = "" if here.tested or not here.architecture else f"\n{here.architecture}: untested"
    shown = Table(
        "bench", "metric", f"ours ({here.key}){mark}", f"ours, recorded ({RECORDED})", "theirs, same run", "paper", "unit",
        box=None, pad_edge=False,
    )  # fmt: skip
    for row in report.rows:
        numbers = (_short(row[column]) for column in ("ours", "recorded", "theirs", "paper"))
        shown.add_row(row["bench"], row["metric"], *numbers, row["unit"])
    return shown


def footnote(report: Report) -> str:
    """Return what a reader of the table must know about the machine, and what is not in it."""
    left_out = f"; not of a GPU, so not measured unless named with --only: {', '.join(report.left_out)}" if report.left_out else ""
    return _about(report.machine) + left_out


def _about(here: Machine) -> str:
    if not here.architecture:
        return f"{here.gpu}: no GPU, so these are no times of the CUDA kernels"
    if here.tested:
        return f"{here.gpu} ({here.architecture}): the CUDA kernels' tests have passed on this architecture"
    return (
        f"{here.gpu} ({here.architecture}) is an untested architecture: the CUDA kernels run when asked for by name, as the "
        "benches do; `pytest -m gpu` and the benches mixed_decode_errors and sanitizer tell whether they are right there"
    )


class _Journal:
    """Which source, packages and GPU made which record of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = {"code": fingerprint(), "versions": environment.versions(), "gpus": environment.hardware()["gpus"]}
        try:
            self.entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or one damaged by a kill: measure again
            self.entries = {}

    def keeps(self, name: str, key: str, folder: Path, quick: bool) -> bool:
        """Whether a record is whole and was made by what would make it now."""
        try:
            found = records.read(name, key, folder).provenance
        except WqlabError:
            return False
        if quick != found["command"].endswith("--quick"):
            return False
        if self.entries.get(name) == {**self.key, "sha256": found["sha256"]}:
            return True
        # Made by `wqlab bench`: a commit says which code that was, unless there were changes.
        commit = environment.git_commit()
        same = (found["git_commit"], found["versions"], found["hardware"]["gpus"]) == (
            commit,
            self.key["versions"],
            self.key["gpus"],
        )
        return same and not commit.endswith("+changes") and not commit.startswith("unknown")

    def finish(self, name: str) -> None:
        """Remember the record that was just written."""
        described = json.loads((self.path.parent / f"{name}.json").read_text(encoding="utf-8"))
        self.entries[name] = {**self.key, "sha256": described["sha256"]}
        paths.write_text(self.path, records.dump_json(self.entries))


def fingerprint() -> str:
    """Return a sha256 over the package's source and the kernels: what decides a measurement, beside packages and hardware."""
    digest = hashlib.sha256()
    package, kernels = Path(bench.__file__).parents[1], paths.shipped("kernels")
    for file in sorted([*package.rglob("*.py"), *kernels.glob("*.cu*")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _run(name: str, folder: Path, quick: bool) -> tuple[Literal["measured", "outside", "failed"], str]:
    """Run a bench in a process of its own; return how it ended and why."""
    given = json.dumps([name, str(folder.resolve()), quick, sys.path, registry.packages("bench")])
    done = subprocess.run([sys.executable, "-c", _CHILD, given], capture_output=True, text=True, errors="replace", check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        ended, why = json.loads(last)
    except ValueError:
        tail = " | ".join(done.stderr.strip().splitlines()[-2:])
        return "failed", f"its process ended with exit code {done.returncode}: {tail}"
    return ended, " ".join(why.split())


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
