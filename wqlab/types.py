"""Frozen dataclasses that every floor speaks."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from wqlab.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor

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
class VQSpec:
    """A vector quantization VQ<vector_size, num_entries, num_residuals> (VQ-LLM, Sect. 2.2).

    The paper writes entries as their number in places and as log2 in others; here they are always a number.

    Parameters
    ----------
    vector_size : int
        Elements that one index stands for.
    num_entries : int
        Entries of a codebook.
    num_residuals : int
        Codebooks whose entries are summed (residual or additive).
    scope : str
        What one codebook serves, for example ``"tensor"``, ``"tile 256x256"``, ``"head x 4 channels"``.
    switch_axes : str
        Axes along which the codebook changes, of R (residual), M, N (of a weight), H, C (head, channel) (Table III).

    Raises
    ------
    ParameterError
        For a size below 1.
    """

    vector_size: int
    num_entries: int
    num_residuals: int = 1
    scope: str = "tensor"
    switch_axes: str = ""

    def __post_init__(self) -> None:
        for name in ("vector_size", "num_entries", "num_residuals"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(f"{name} = {value!r} is not a whole number, 1 or more")

    def __str__(self) -> str:
        return f"VQ<{self.vector_size},{self.num_entries},{self.num_residuals}>"

    @property
    def index_bits(self) -> int:
        """Bits of one index: ``ceil(log2(num_entries))``."""
        return max((self.num_entries - 1).bit_length(), 1)

    @property
    def code_bits(self) -> float:
        """Bits per element of the indices alone; codebooks and scales come on top."""
        return self.num_residuals * self.index_bits / self.vector_size

    @classmethod
    def parse(cls, text: str, scope: str = "tensor", switch_axes: str = "") -> VQSpec:
        """Return the spec that ``"VQ<x,y,z>"`` writes.

        Raises
        ------
        ParameterError
            For other text.
        """
        found = re.fullmatch(r"VQ<\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*>", text.strip())
        if found is None:
            raise ParameterError(f"{text!r} is not VQ<vector_size,num_entries,num_residuals>, for example VQ<4,256,1>")
        vector_size, num_entries, num_residuals = map(int, found.groups())
        return cls(vector_size, num_entries, num_residuals, scope, switch_axes)


@dataclass(frozen=True)
class PlanSummary:
    """What a `WindowPlan` holds, counted over layers and the windows that each batch row has; the tails are not in it.

    Parameters
    ----------
    windows : dict of int to int
        Bit width (16, 4, 2) -> windows.
    share : dict of int to float
        Bit width -> share of the windows, in [0, 1].
    mean_bits : float
        Mean bit width of the codes; scales and minima come on top.
    """

    windows: dict[int, int]
    share: dict[int, float]
    mean_bits: float


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """Which window of which layer keeps how many bits (WindowQuant, Sect. 3.2). One plan serves all rows of a batch.

    `wqlab.windows.plan.make_plan` makes it. What belongs to no whole window, the tail, stays in full precision.

    Parameters
    ----------
    bit_widths : Tensor or ndarray
        int64 [num_layers, num_windows], 16, 4 or 2. On the device where it was made; `wqlab.windows.plan.on_host` fetches it.
        0 marks a window whose score was not finite in a search with ``check=False``.
    window_size : int
        Tokens per window, also where windows are counted in frames.
    windows_per_row : tuple of int
        [batch]; row b has the first ``windows_per_row[b]`` windows.
    tail_tokens : tuple of int
        [batch]; visual tokens of each row behind its last window.
    alpha, normalize, scorer, first_window_full, preset
        How it was made.

    Raises
    ------
    ValueError
        When the shapes do not fit each other.
    """

    bit_widths: Tensor | np.ndarray[Any, Any]
    window_size: int
    windows_per_row: tuple[int, ...]
    tail_tokens: tuple[int, ...]
    alpha: float
    normalize: str
    scorer: str
    first_window_full: bool = True
    preset: str | None = None

    def __post_init__(self) -> None:
        rows, tails = self.windows_per_row, self.tail_tokens
        if self.bit_widths.ndim != 2 or not rows or max(rows) != self.num_windows or len(rows) != len(tails):
            raise ValueError(
                f"bit_widths {tuple(self.bit_widths.shape)} must be [layers, windows], with windows_per_row {rows} and tail_tokens "
                f"{tails} naming the same rows, the longest of which has all windows"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.bit_widths.shape[0])

    @property
    def num_windows(self) -> int:
        """Windows of the longest row."""
        return int(self.bit_widths.shape[1])

    def summary(self) -> PlanSummary:
        """Count windows per width; for a plan on a device this waits for it.

        Raises
        ------
        ValueError
            When a window has another width than 16, 4 or 2: `wqlab.windows.plan.on_host` says why.
        """
        # Column w counts once for every row that has it.
        rows_with = [sum(count > w for count in self.windows_per_row) for w in range(self.num_windows)]
        per_width: dict[int, int] = {}
        for bits in (16, 4, 2):
            per_width[bits] = sum(n * r for n, r in zip((self.bit_widths == bits).sum(0).tolist(), rows_with, strict=True))
        total = sum(self.windows_per_row) * self.num_layers
        if sum(per_width.values()) != total:
            raise ValueError("the plan has widths other than 16, 4 and 2; wqlab.windows.plan.on_host(plan) says why")
        share = {bits: n / total for bits, n in per_width.items()}
        return PlanSummary(windows=per_width, share=share, mean_bits=sum(bits * s for bits, s in share.items()))

    def permuted(self, seed: int) -> WindowPlan:
        """Return the ablation "random plan" of the same memory: the widths, permuted over windows.

        One permutation serves all layers, so which windows share a width is kept and only *which* windows they are is lost. A first
        window in full precision stays where it is. In a ragged batch a window changes place only with those that the same rows
        have, so every row keeps its memory.

        Parameters
        ----------
        seed : int
            Of the permutation.
        """
        import numpy as np

        generator = np.random.default_rng(seed)
        edges = sorted({0, int(self.first_window_full), *self.windows_per_row})
        order = [w for start, stop in itertools.pairwise(edges) for w in (start + generator.permutation(stop - start)).tolist()]
        scorer = f"{self.scorer}, permuted with seed {seed}"
        return replace(self, bit_widths=self.bit_widths[:, order], scorer=scorer, preset=None)


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
