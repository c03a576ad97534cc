"""Frozen dataclasses that every floor speaks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

EvidenceKind = Literal["measured", "recorded", "simulated", "paper"]

#: What a quantization group is; a window is `window_size` consecutive tokens of one K or V tensor [batch, heads, seq, head_dim].
#: ``window_channel``: one (scale, min) per window, head and channel; ``window_head``: per window and head; ``window``: per window.
Granularity = Literal["window_channel", "window_head", "window"]


@dataclass(frozen=True)
class Evidence:
    """Where a number comes from. Every series of a figure and every value in the ledger carries one.

    Parameters
    ----------
    kind : {"measured", "recorded", "simulated", "paper"}
        ``measured``: here and now. ``recorded``: measured earlier, by a bench that wrote `file`. ``simulated``: computed from a
        model of the thing. ``paper``: printed in the paper.
    source : str
        What was run, which model computed it, or where it is printed.
    hardware, file, commit, date : str, optional
        Required for ``recorded``; `hardware` is required for ``measured`` too.

    Raises
    ------
    ValueError
        When a field that the kind needs is missing.
    """

    kind: EvidenceKind
    source: str
    hardware: str | None = None
    file: str | None = None
    commit: str | None = None
    date: str | None = None

    def __post_init__(self) -> None:
        needed = {"measured": ("hardware",), "recorded": ("hardware", "file", "commit", "date")}
        if self.kind not in ("measured", "recorded", "simulated", "paper"):
            raise ValueError(f"evidence kind {self.kind!r} is not one of measured, recorded, simulated, paper")
        missing = [name for name in ("source", *needed.get(self.kind, ())) if not getattr(self, name)]
        if missing:
            raise ValueError(f"{self.kind} evidence needs {', '.join(missing)}")

    def caption(self) -> str:
        """Return one sentence for a caption."""
        if self.kind == "measured":
            return f"measured here: {self.source}, on {self.hardware}"
        if self.kind == "recorded":
            commit = str(self.commit).split(maxsplit=1)[0][:9]  # a machine without git says "unknown (...)"
            return f"recorded {self.date}: {self.source}, on {self.hardware} ({self.file}, commit {commit})"
        if self.kind == "simulated":
            return f"simulated: {self.source}"
        return f"printed in the paper: {self.source}"


@dataclass(frozen=True)
class QuantSpec:
    """An element-wise quantization: how many bits, over which groups.

    Parameters
    ----------
    num_bits : int
        Bits per code: 2, 4 or 8.
    window_size : int
        Tokens per window (the paper's S, default 32).
    granularity : Granularity
        Which elements share one ``(scale, min)`` pair.
    """

    num_bits: int
    window_size: int = 32
    granularity: Granularity = "window_channel"


@dataclass(frozen=True)
class Value:
    """One number that a figure states and the ledger may judge.

    Parameters
    ----------
    value : float
        Finite.
    unit : str
        For example ``"GB"``, ``"ratio"``, ``"1"`` for a pure number.
    column : str
        The column of the result's table whose evidence it has.
    """

    value: float
    unit: str
    column: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a stated value must be finite, got {self.value}")


@dataclass(frozen=True)
class Input:
    """Something an experiment read: its name and the sha256 of its content."""

    name: str
    sha256: str


@dataclass
class Result:
    """What an experiment returns: a tidy table with the evidence of each of its columns.

    Parameters
    ----------
    stem : str
        The name shared by notebook, experiment, figure and output files.
    parameters : dict
        The validated parameters, JSON-ready.
    data : pandas.DataFrame
        Tidy: one observation per row. Columns not named in `evidence` are coordinates (layer, head, alpha, ...).
    evidence : dict of str to Evidence
        Column -> evidence. One column never mixes kinds.
    values : dict of str to Value
        The numbers that the ledger may judge.
    inputs : list of Input
        Weights, texts and records that were read.
    notes : list of str
        What a reader must know, printed under the figure.
    pictures : dict of str to ndarray
        What a figure shows and no table holds, such as frames of a video: uint8 [..., height, width, 3]. They are not saved.
    runtime_s : float
        Seconds the experiment took; `wqlab.experiments.run` fills it in.
    """

    stem: str
    parameters: dict[str, Any]
    data: pd.DataFrame
    evidence: dict[str, Evidence]
    values: dict[str, Value] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)
    runtime_s: float = 0.0

    def __post_init__(self) -> None:
        lost = [c for c in self.evidence if c not in self.data.columns]
        if lost:
            raise ValueError(f"{self.stem}: evidence for columns that the table lacks: {', '.join(lost)}")
        if self.data.empty or not self.evidence:
            raise ValueError(f"{self.stem}: a result needs rows and evidence for at least one column")
        for name, value in self.values.items():
            if value.column not in self.evidence:
                raise ValueError(f"{self.stem}: value {name} refers to column {value.column!r}, which has no evidence")

    def evidence_json(self) -> dict[str, dict[str, Any]]:
        """Return the evidence per column as plain dicts without empty fields."""
        return {c: {k: v for k, v in asdict(e).items() if v is not None} for c, e in self.evidence.items()}
