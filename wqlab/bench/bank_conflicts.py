"""Wavefronts and bank conflicts of codebook look-ups in shared memory, simulated and counted by ncu on the same look-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqlab.bench import Bench, Headline
from wqlab.errors import LimitError, MissingPartError
from wqlab.registry import register
from wqlab.simulate.bank_conflicts import INACTIVE, WARP, Layout, replay, zipf_indices

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from numpy.typing import NDArray

#: Look-ups of a case, per warp; an entry takes one load or more.
WARPS, _QUICK_WARPS = 2048, 64
SEED = 0
#: The simulator's error stays within this.
MAX_ERROR = 0.05
_GRID, _THREADS = 64, 128


class Case(NamedTuple):
    """A layout, and what is looked up in it.

    Parameters
    ----------
    layout : Layout
        Of the codebook.
    pattern : str
        ``random`` draws entries; ``stride S`` has lane l look up entry ``S * l`` (and warp w that plus w); ``broadcast`` one entry
        for all lanes; ``pairs D`` the same entry in lanes i and i xor D; ``half pairs`` that for the first half warp only.
    skew : float
        Of the random entries (Zipf).
    n_reg : int
        Entries that are held in registers.
    """

    layout: Layout
    pattern: str = "random"
    skew: float = 0.0
    n_reg: int = 0


def cases() -> list[Case]:
    """Return all cases: good and bad patterns first, then random look-ups in codebooks of 256 and 4,096 entries."""
    words = {bytes_: Layout(1024, bytes_, bytes_) for bytes_ in (4, 8, 16)}
    found = [Case(words[4], f"stride {stride}") for stride in (1, 2, 3, 8, 32, 33)]
    found += [Case(words[8], f"stride {stride}") for stride in (1, 2, 16, 17)]
    found += [Case(words[16], f"stride {stride}") for stride in (1, 2, 8, 9)]
    found += [Case(layout, "broadcast") for layout in words.values()]
    found += [Case(words[bytes_], f"pairs {distance}") for bytes_ in (8, 16) for distance in (1, 2, 4)]
    found.append(Case(words[16], "half pairs"))
    for entries in (256, 4096):
        # Vectors of 2, 4 and 8 halves, loaded at once; the most looked up ones in registers.
        for size in (4, 8, 16):
            layout = Layout(entries, size, size)
            found += [Case(layout, skew=skew, n_reg=n_reg) for skew, n_reg in ((0.0, 0), (1.0, 0), (1.0, 8))]
        # Entries of several loads, as they come, padded and swizzled.
        for size, access in ((16, 4), (32, 16)):
            found += [
                Case(Layout(entries, size, access)),
                Case(Layout(entries, size, access, "padded", access)),
                Case(Layout(entries, size, access, "swizzled")),
            ]
        found.append(Case(Layout(entries, 8, 4, "swizzled"), skew=1.0))
        found.append(Case(Layout(entries, 8, 4), skew=1.0, n_reg=32))
    found += [Case(Layout(256, size, size, "replicated", copies=128 // size)) for size in (4, 8, 16)]
    found += [Case(Layout(256, size, size, "replicated", copies=4)) for size in (4, 8, 16)]
    return found


def indices(case: Case, num_warps: int = WARPS) -> NDArray[np.int32]:
    """Return the entries that a case looks up, int32 [num_warps, 32]; always the same ones."""
    lanes, entries = np.arange(WARP), case.layout.num_entries
    kind, _, number = case.pattern.rpartition(" ")
    if kind == "stride":
        drawn = lanes * int(number) + np.arange(num_warps)[:, None]
        return np.asarray(drawn % entries, dtype=np.int32)
    drawn = zipf_indices(num_warps, entries, case.skew, SEED)
    if case.pattern == "broadcast":
        lanes = np.zeros_like(lanes)
    elif kind == "pairs":
        lanes = lanes & ~int(number)
    elif case.pattern == "half pairs":
        lanes = np.where(lanes < WARP // 2, lanes & ~1, lanes)
    return np.ascontiguousarray(drawn[:, lanes], dtype=np.int32)


@register("bench", "bank_conflicts")
class BankConflictsBench(Bench):
    """Every case is launched once under ncu, all in one process; its result is checked word by word in another."""

    name = "bank_conflicts"
    description = "shared-memory wavefronts and bank conflicts of codebook look-ups, simulated and counted (60 s, a GPU with ncu)"
    columns = {  # noqa: RUF012
        "pattern": "of the lanes: random entries; stride S: entry S * lane + warp; broadcast: one entry; pairs D: the same one "
        "in lanes i and i xor D; half pairs: pairs 1 in the first half warp",
        "skew": "random entries are drawn in proportion to (entry + 1) ** -skew",
        "n_reg": "entries from 0 on that are held in registers and not loaded",
        "num_entries": "of the codebook",
        "entry_bytes": "of an entry",
        "access_bytes": "that a lane loads at once",
        "scheme": "of the layout: contiguous, padded, swizzled, replicated",
        "padding_bytes": "behind every entry",
        "copies": "of the codebook, interleaved; lane l reads copy l mod copies",
        "shared_bytes": "that the codebook takes",
        "loads": "of warps that have an active lane, counted here",
        "simulated_wavefronts": "by wqlab.simulate.bank_conflicts",
        "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "wavefront_error": "simulated_wavefronts / wavefronts - 1",
        "simulated_conflicts": "by wqlab.simulate.bank_conflicts",
        "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "conflict_error": "(simulated_conflicts - conflicts) / the larger of conflicts and loads: below one conflict per load the "
        "difference is that per load",
        "sass_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum, where ncu has it",
        "sass_conflicts": "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum, where ncu has it",
        "instructions": "smsp__inst_executed_op_shared_ld.sum, where ncu has it",
        "counters": "which tool counted; unavailable: why nothing, or what not, was counted",
        "note": "what went wrong, else empty",
        "seed": "of the draws",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per case.

        Raises
        ------
        MissingPartError
            Without a CUDA device, unless the run is a quick one: that shows the simulated half.
        """
        import pandas as pd
        import torch

        there = torch.cuda.is_available()
        if not (there or quick):
            raise MissingPartError(f"{self.name} counts on a CUDA device, and torch finds none; --quick shows the table without")
        num_warps = _QUICK_WARPS if quick else WARPS
        rows = [simulated(case, num_warps) for case in cases()]
        counts = counted(num_warps) if there else [{"counters": "unavailable: no CUDA device"}] * len(rows)
        notes = [_check(case, num_warps, torch.device("cuda")) if there else "" for case in cases()]
        data = pd.DataFrame([{**row, **count, "note": note} for row, count, note in zip(rows, counts, notes, strict=True)])
        data = data.reindex(columns=list(self.columns))
        given = ["wavefronts", "conflicts", "sass_wavefronts", "sass_conflicts", "instructions"]
        data[given] = data[given].astype(float)
        data["wavefront_error"] = data["simulated_wavefronts"] / data["wavefronts"] - 1
        data["conflict_error"] = (data["simulated_conflicts"] - data["conflicts"]) / data[["conflicts", "loads"]].max(axis=1)
        return data

    def check(self, data: pd.DataFrame) -> None:
        """Raise LimitError where a result is wrong, or the simulator differs from a counter by more than `MAX_ERROR`."""
        wrong = data[data["note"] != ""]
        if len(wrong):
            raise LimitError(f"{len(wrong)} of {len(data)} cases computed something else, the first: {wrong['note'].iloc[0]}")
        for what in ("wavefront_error", "conflict_error"):
            far = data[data[what].abs() > MAX_ERROR]
            if len(far):
                shown = far[["pattern", "skew", "n_reg", "num_entries", "entry_bytes", "access_bytes", "scheme", what]]
                raise LimitError(
                    f"{what} is above {MAX_ERROR} in {len(far)} of {len(data)} cases, the largest:\n"
                    f"{shown.reindex(far[what].abs().sort_values(ascending=False).index).head(8).to_string()}"
                )

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the largest errors, where there are counts."""
        names = {"wavefront_error": "shared-memory wavefronts", "conflict_error": "bank conflicts"}
        return [
            Headline(f"largest error of the simulated {name}", float(100 * data[what].abs().max()), None, "%")
            for what, name in names.items()
            if data[what].notna().any()
        ]


def simulated(case: Case, num_warps: int = WARPS) -> dict[str, Any]:
    """Return the columns of a case that need no GPU."""
    layout = case.layout
    addresses = layout.addresses(indices(case, num_warps), case.n_reg)
    found = replay(addresses, layout.access_bytes)
    return {
        "pattern": case.pattern, "skew": case.skew, "n_reg": case.n_reg, "num_entries": layout.num_entries,
        "entry_bytes": layout.entry_bytes, "access_bytes": layout.access_bytes, "scheme": layout.scheme,
        "padding_bytes": layout.padding_bytes, "copies": layout.copies, "shared_bytes": layout.shared_bytes,
        "loads": int((addresses != INACTIVE).any(axis=-1).sum()), "simulated_wavefronts": int(found.wavefronts.sum()),
        "simulated_conflicts": int(found.conflicts.sum()), "seed": SEED,
    }  # fmt: skip


def counted(num_warps: int) -> list[dict[str, Any]]:
    """Return what ncu counts for each case, in order, or why it cannot; what it counts are `launches`."""
    from wqlab.profile import counters

    wanted = len(cases())
    try:
        found = counters.table(
            counters.Driver("wqlab.bench.bank_conflicts:launches", (num_warps,)), "shared loads", "^bank_conflicts"
        )
        if len(found) != wanted:
            raise MissingPartError(f"ncu saw {len(found)} launches of {wanted}")
    except MissingPartError as missing:
        return [{"counters": f"unavailable: {missing}"}] * wanted
    return [{str(name): value for name, value in row.items()} | {"counters": row["source"]} for row in found.to_dict("records")]


def launches(num_warps: int = WARPS) -> Iterator[Callable[[], torch.Tensor]]:
    """Yield a call for every case, of which each launches its kernel; ncu counts them."""
    import torch

    for case in cases():
        yield prepared(case, num_warps, torch.device("cuda"))[0]


def prepared(case: Case, num_warps: int, device: torch.device) -> tuple[Callable[[], torch.Tensor], NDArray[np.uint32]]:
    """Return a call that launches a case and gives its sums, int32 [num_warps, 32], and what they must be.

    The codebook's image is random words, so that a load from any other place is seen.
    """
    import torch

    from wqlab import codegen

    layout, looked_up = case.layout, indices(case, num_warps)
    words = np.random.default_rng(SEED).integers(0, 2**32, layout.shared_bytes // 4, dtype=np.uint32)
    major, minor = torch.cuda.get_device_capability(device)
    compiled = codegen.compile_cubin(codegen.render("bank_conflicts"), arch=f"sm_{major}{minor}")
    kernel = codegen.load(compiled, f"bank_conflicts_{layout.access_bytes}", device)
    image, entries = (torch.from_numpy(x.view(np.int32)).to(device) for x in (words, looked_up))
    sums = torch.full((num_warps, WARP), -1, dtype=torch.int32, device=device)
    numbers = num_warps, layout.shared_bytes, layout.chunks, layout.stride, layout.swizzle, layout.copies, case.n_reg

    def launch() -> torch.Tensor:
        scalars = (np.int32(number) for number in numbers)
        kernel.launch(None, (_GRID,), (_THREADS,), layout.shared_bytes, entries, image, sums, *scalars)
        return sums

    return launch, expected(case, words, looked_up)


def expected(case: Case, words: NDArray[np.uint32], looked_up: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Return the xor of the words that each lane must read, uint32 [num_warps, 32], by the simulator's addresses."""
    addresses = case.layout.addresses(looked_up, case.n_reg)
    found = np.zeros(looked_up.shape, dtype=np.uint32)
    for chunk in range(case.layout.chunks):
        at = addresses[:, chunk]
        for word in range(case.layout.access_bytes // 4):
            found ^= np.where(at == INACTIVE, np.uint32(0), words[np.maximum(at, 0) // 4 + word])
    return found


def _check(case: Case, num_warps: int, device: torch.device) -> str:
    launch, wanted = prepared(case, num_warps, device)
    wrong = int((launch().cpu().numpy().view(np.uint32) != wanted).sum())
    return f"{case}: {wrong} of {wanted.size} look-ups read something else" if wrong else ""
