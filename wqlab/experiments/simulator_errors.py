"""How far the simulators were from a GPU's counters and driver, for the caption of every simulated figure."""

from __future__ import annotations

from wqlab.bench.bank_conflicts import BankConflictsBench
from wqlab.bench.occupancy import OccupancyBench
from wqlab.experiments import gpu_records
from wqlab.types import Input

#: The GPU that the simulators were held to.
GPU = "h200"


def of_bank_conflicts(gpu: str = GPU) -> tuple[str, list[Input]]:
    """Return a note on the error of simulated wavefronts and conflicts, and the record that it is from."""
    name = BankConflictsBench.name
    record = gpu_records.find(name, gpu)
    counted = record.data[record.data["wavefronts"].notna()] if record else None
    if record is None or counted is None or counted.empty:
        why = f"; its record says {record.data['counters'].iloc[0]}" if record else ""
        return f"Bank conflicts are not validated yet{why}: {gpu_records.how_to_get(name, gpu)}.", []
    wavefronts, conflicts = (100 * float(counted[f"{what}_error"].abs().max()) for what in ("wavefront", "conflict"))
    return (
        f"Validated: over {len(counted)} kinds of look-ups on {record.evidence().hardware}, simulated wavefronts were within "
        f"{wavefronts:.2g} % of the counters and conflicts within {conflicts:.2g} % (wqlab bench {name}, "
        f"{record.provenance['date'][:10]})."
    ), [record.input()]


def of_occupancy(gpu: str = GPU) -> tuple[str, list[Input]]:
    """Return a note on how often the simulated occupancy is the driver's, and the record that it is from."""
    name = OccupancyBench.name
    record = gpu_records.find(name, gpu)
    if record is None:
        return f"Occupancy is not validated yet: {gpu_records.how_to_get(name, gpu)}.", []
    return (
        f"Validated: the simulated blocks were the driver's in {int(record.data['equal'].sum()):,} of {len(record.data):,} "
        f"configurations on {record.evidence().hardware} (wqlab bench {name}, {record.provenance['date'][:10]})."
    ), [record.input()]
