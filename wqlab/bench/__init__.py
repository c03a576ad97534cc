"""Benches: measure speed, memory or a calibration once, and write a record with its provenance. One file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from wqlab import paths, records, registry
from wqlab.profile import environment

if TYPE_CHECKING:
    import pandas as pd


class Headline(NamedTuple):
    """A number of a record that a reader looks for first.

    Parameters
    ----------
    metric : str
        What it is, for which case.
    ours, theirs : float, optional
        Measured by this project, and by the strongest other implementation in the same run; None where there is none.
    unit : str
        Of both.
    claim : str, optional
        The ledger's entry that holds what a paper prints for it; it is shown where its unit is the same.
    """

    metric: str
    ours: float | None
    theirs: float | None
    unit: str
    claim: str | None = None


class Bench(ABC):
    """One record's measurement. Register a subclass with ``@register("bench", name)``.

    Attributes
    ----------
    name : str
        The record's name and the word after ``wqlab bench``.
    description : str
        One line for ``wqlab bench --help`` and lists.
    columns : dict of str to str
        The table's columns, in order, each with meaning and unit.
    uses_gpu : bool
        Whether a GPU changes what it measures; `wqlab measure` leaves out those that it does not.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    columns: ClassVar[dict[str, str]]
    uses_gpu: ClassVar[bool] = True

    @abstractmethod
    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return the tidy table with exactly `columns`."""

    def check(self, data: pd.DataFrame) -> None:
        """Raise LimitError where the table shows a result outside a limit; called once the record is written. Default: no limit."""
        return

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the numbers of a table that are shown beside others' and the papers'. Default: none."""
        return []


def get(name: str) -> Bench:
    """Return the bench `name`; raises UnknownNameError with the closest names."""
    bench: Bench = registry.lookup("bench", name)()
    return bench


def default_folder() -> Path:
    """Return where records go: ``data/recorded`` of the checkout, else ``recorded`` in the current folder."""
    root = paths.checkout()
    return root / "data" / "recorded" if root else Path("recorded")


def run(name: str, out: Path | str | None = None, quick: bool = False) -> Path:
    """Run a bench and write its record.

    Parameters
    ----------
    name : str
        Which bench.
    out : path, optional
        The folder that holds one folder per GPU key; default: `default_folder`.
    quick : bool
        Smaller and not for keeping; needs an `out` of its own.

    Returns
    -------
    Path
        The table written.

    Raises
    ------
    UnknownNameError, OutputError
        For an unknown bench, or a folder that cannot be written; nothing was measured.
    LimitError
        When the record, which was written, shows a result outside a limit.
    """
    bench = get(name)
    folder = paths.output_dir(out if out is not None else default_folder())
    data = bench.measure(quick=quick)
    command = f"wqlab bench {name}" + (" --quick" if quick else "")
    path = records.write(name, environment.gpu_key(), data, bench.columns, environment.provenance(command), folder)
    bench.check(data)
    return path
