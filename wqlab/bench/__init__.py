"""Benches: measure speed, memory or a calibration once, and write a record with its provenance. One file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from wqlab import paths, records, registry
from wqlab.profile import environment

if TYPE_CHECKING:
    import pandas as pd


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
    """

    name: ClassVar[str]
    description: ClassVar[str]
    columns: ClassVar[dict[str, str]]

    @abstractmethod
    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return the tidy table with exactly `columns`."""


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
    """
    bench = get(name)
    folder = paths.output_dir(out if out is not None else default_folder())
    data = bench.measure(quick=quick)
    command = f"wqlab bench {name}" + (" --quick" if quick else "")
    return records.write(name, environment.gpu_key(), data, bench.columns, environment.provenance(command), folder)
