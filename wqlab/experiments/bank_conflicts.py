"""Bank conflicts of codebook look-ups in shared memory, for four layouts: which banks, how many wavefronts, and at what rate."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from wqlab.errors import ParameterError
from wqlab.experiments import Experiment, Parameters, simulator_errors, slider
from wqlab.registry import register
from wqlab.simulate import gpus
from wqlab.simulate.bank_conflicts import ROW_BYTES, SCHEMES, Layout, Scheme, frequencies, replay, zipf_indices
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

#: Entries of the heat map: those that are looked up most.
SHOWN = 64
SEED = 0
_WARPS, _QUICK_WARPS = 512, 64
_HALF_BYTES = 2


class BankConflictsParameters(Parameters):
    """Parameters of `bank_conflicts`.

    Parameters
    ----------
    entry_bytes : int
        Of an entry: 2 bytes for each element in FP16.
    num_entries : int
        Of the codebook, the most frequent first.
    skew : float
        Entry e is looked up in proportion to ``(e + 1) ** -skew``.
    n_reg : int
        Entries from 0 on that are held in registers.
    padding_bytes : int
        Behind every entry of the padded layout.
    scheme : {"contiguous", "padded", "swizzled", "replicated"}
        The layout of the heat map.
    access : {"widest", "4 bytes"}
        What a lane loads at once: the most of 16, 8 and 4 bytes that the entry (and its padding) is aligned to, or words.
    gpu : str
        Whose shared memory the codebook has to fit.
    """

    entry_bytes: int = slider(8, 4, 64, 4, "bytes of an entry; 2 per FP16 element", ge=4, le=256, multiple_of=4)
    num_entries: int = slider(256, 16, 4096, 16, "entries of the codebook, the most frequent first", ge=1, le=65_536)
    skew: float = slider(0.5, 0.0, 2.0, 0.1, "of the access frequencies: (entry + 1) ** -skew", ge=0, le=10)
    n_reg: int = slider(0, 0, 32, 1, "most frequent entries that are held in registers", ge=0, le=65_536)
    padding_bytes: int = slider(4, 4, 32, 4, "behind every entry, where the layout is padded", ge=4, le=256, multiple_of=4)
    scheme: Literal["contiguous", "padded", "swizzled", "replicated"] = Field("contiguous", description="layout of the heat map")
    access: Literal["widest", "4 bytes"] = Field("widest", description="what a lane loads at once")
    gpu: str = Field("h200", description="whose shared memory the codebook has to fit")


@register("stem", "bank_conflicts")
class BankConflicts(Experiment[BankConflictsParameters]):
    """Random look-ups of whole warps, replayed by `wqlab.simulate.bank_conflicts`."""

    stem = "bank_conflicts"
    title = "Bank conflicts of codebook look-ups"
    paper = "VQ-LLM, Sect. III and V (bank conflicts of codebooks in shared memory)"
    Parameters = BankConflictsParameters

    def run(self, parameters: BankConflictsParameters) -> Result:
        """Compute a table of four parts.

        Returns
        -------
        Result
            ``part == "entry"``: for the most frequent entries, ``share`` of all words loaded that come from this entry and bank.
            ``"bank"``: the same per bank, over all entries. ``"wavefronts"``: per layout, ``loads`` of warps (a share of them) that
            take ``wavefronts``. ``"layout"``: per layout, wavefronts and conflicts per look-up of a warp, and elements per clock.

        Raises
        ------
        ParameterError
            When the layout of the heat map does not fit the GPU's shared memory, or `n_reg` is more than the entries.
        UnknownNameError
            For an unknown GPU.
        """
        import pandas as pd

        p, gpu = parameters, gpus.gpu(parameters.gpu)
        layouts, left_out = _layouts(p, gpu)
        indices = _indices(_QUICK_WARPS if p.quick else _WARPS, p.num_entries, p.skew)
        parts, rows = [_heat(layouts[p.scheme], p)], []
        for scheme, layout in layouts.items():
            found = replay(layout.addresses(indices, p.n_reg), layout.access_bytes)
            counts = np.bincount(found.wavefronts)
            parts.append(
                pd.DataFrame(
                    {
                        "part": "wavefronts", "scheme": scheme, "wavefronts": np.arange(len(counts)),
                        "loads": counts / counts.sum(),
                    }
                )
            )  # fmt: skip
            per_lookup = float(found.wavefronts.sum()) / len(indices)
            rows.append(
                {
                    "part": "layout", "scheme": scheme, "access_bytes": layout.access_bytes, "copies": layout.copies,
                    "shared_kb": layout.shared_bytes / 1024, "wavefronts_per_lookup": per_lookup,
                    "conflicts_per_lookup": float(found.conflicts.sum()) / len(indices),
                    "elements_per_clock": _rate(p, per_lookup),
                }
            )  # fmt: skip
        table = pd.DataFrame(rows)
        note, inputs = simulator_errors.of_bank_conflicts()
        columns = ("share", "loads", "shared_kb", "wavefronts_per_lookup", "conflicts_per_lookup", "elements_per_clock")
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=pd.concat([*parts, table], ignore_index=True),
            evidence=dict.fromkeys(columns, Evidence(kind="simulated", source=_source(len(indices), p))),
            values=_values(table),
            inputs=inputs,
            notes=[
                note,
                "A wavefront is one clock of shared memory; elements are FP16 ones of look-ups, per clock and multiprocessor (SM), "
                "with nothing else in shared memory.",
                *left_out,
            ],
        )


def _source(num_warps: int, p: BankConflictsParameters) -> str:
    drawn = f"entry e in proportion to (e + 1)^-{p.skew:g}, seed {SEED}"
    return f"wqlab.simulate.bank_conflicts, {num_warps * 32:,} random look-ups, {drawn}"


@lru_cache(maxsize=4)
def _indices(num_warps: int, num_entries: int, skew: float) -> NDArray[np.int32]:
    return zipf_indices(num_warps, num_entries, skew, SEED)


def _layouts(p: BankConflictsParameters, gpu: gpus.GPUSpec) -> tuple[dict[Scheme, Layout], list[str]]:
    """Return the layouts that fit, and notes on those that do not; the one of the heat map must."""
    found: dict[Scheme, Layout] = {}
    left_out = []
    for scheme in SCHEMES:
        padding = p.padding_bytes if scheme == "padded" else 0
        layout = Layout(p.num_entries, p.entry_bytes, _access(p, padding), scheme, padding)
        if scheme == "replicated":
            layout = _most_copies(layout, gpu)
        try:
            layout.check(gpu)
            found[scheme] = layout
        except ParameterError as error:
            if scheme == p.scheme:
                raise
            left_out.append(f"Left out, {scheme}: {error}.")
    return found, left_out


def _access(p: BankConflictsParameters, padding: int) -> int:
    if p.access == "4 bytes":
        return 4
    return next(size for size in (16, 8, 4) if p.entry_bytes % size == padding % size == 0)


def _most_copies(layout: Layout, gpu: gpus.GPUSpec) -> Layout:
    """Return the layout with as many copies as fit and help: one per lane that is served at once has no conflicts."""
    copies = ROW_BYTES // layout.access_bytes
    while copies > 1 and copies * layout.num_entries * layout.entry_bytes > gpu.shared_bytes_per_block:
        copies //= 2
    return Layout(layout.num_entries, layout.entry_bytes, layout.access_bytes, "replicated", copies=copies)


def _heat(layout: Layout, p: BankConflictsParameters) -> pd.DataFrame:
    """Return the shares of loaded words by entry and bank, for the entries that are shown, and by bank for all."""
    import pandas as pd

    weight = frequencies(p.num_entries, p.skew)
    weight[: p.n_reg] = 0
    # One look-up of every entry by every lane; lanes differ where there are copies.
    looked_up = np.repeat(np.arange(p.num_entries)[:, None], 32, axis=1)
    lanes = slice(0, layout.copies)
    addresses = layout.addresses(looked_up)[:, :, lanes].reshape(p.num_entries, -1)
    words = addresses[:, :, None] // 4 + np.arange(layout.access_bytes // 4)
    banks = (words % 32).reshape(p.num_entries, -1)
    table = np.zeros((p.num_entries, 32))
    np.add.at(table, (np.arange(p.num_entries)[:, None], banks), 1.0)
    table *= (weight / max(weight.sum(), np.finfo(float).tiny))[:, None] / banks.shape[1]
    shown = min(SHOWN, p.num_entries)
    entry, bank = np.divmod(np.arange(shown * 32), 32)
    return pd.concat(
        [
            pd.DataFrame({"part": "entry", "entry": entry, "bank": bank, "share": table[:shown].ravel()}),
            pd.DataFrame({"part": "bank", "bank": np.arange(32), "share": table.sum(axis=0)}),
        ],
        ignore_index=True,
    )


def _rate(p: BankConflictsParameters, wavefronts: float) -> float:
    """Return FP16 elements per clock and multiprocessor; NaN when all look-ups are served from registers."""
    return 32 * p.entry_bytes / _HALF_BYTES / wavefronts if wavefronts else float("nan")


def _values(table: pd.DataFrame) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for row in table.to_dict("records"):
        entries: tuple[tuple[str, Any, str], ...] = (
            ("wavefronts_per_lookup", row["wavefronts_per_lookup"], "wavefronts"),
            ("conflicts_per_lookup", row["conflicts_per_lookup"], "conflicts"),
            ("elements_per_clock", row["elements_per_clock"], "elements per clock"),
        )
        found |= {f"{column}_{row['scheme']}": Value(value, unit, column) for column, value, unit in entries if np.isfinite(value)}
    return found
