"""The simulators held to a GPU: wavefronts and conflicts to its counters, blocks per multiprocessor to its driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import Field

from wqlab.bench.bank_conflicts import cases, simulated
from wqlab.experiments import Experiment, Parameters, gpu_records, simulator_errors
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    from wqlab.records import Record

_CASE = [
    "pattern", "skew", "n_reg", "num_entries", "entry_bytes", "access_bytes", "scheme", "padding_bytes", "copies", "loads",
]  # fmt: skip
_SIMULATED = ("simulated_wavefronts", "simulated_conflicts", "simulated_blocks")


class SimulatorValidationParameters(Parameters):
    """Parameters of `simulator_validation`.

    Parameters
    ----------
    gpu : str
        Whose records.
    """

    gpu: str = Field(simulator_errors.GPU, description="whose records of the benches")


@register("stem", "simulator_validation")
class SimulatorValidation(Experiment[SimulatorValidationParameters]):
    """Predicted against measured, from the records of the benches bank_conflicts and occupancy; what is missing is said."""

    stem = "simulator_validation"
    title = "Simulators against the hardware"
    paper = "Validation of the simulators behind the VQ-LLM figures"
    Parameters = SimulatorValidationParameters

    def run(self, parameters: SimulatorValidationParameters) -> Result:
        """Compute a table of two parts.

        Returns
        -------
        Result
            ``part == "bank_conflicts"``: per case simulated and counted wavefronts and conflicts. ``"occupancy"``: how many
            ``configurations`` have so many simulated and so many of the driver's blocks. Without a record the measured columns
            are missing, and a note says how to get it.

        Raises
        ------
        UnknownNameError
            For a GPU key that does not exist.
        """
        conflicts = gpu_records.find("bank_conflicts", parameters.gpu)
        occupancy = gpu_records.find("occupancy", parameters.gpu)
        source = "wqlab.simulate on the same look-ups and kernels"
        parts, evidence = [_conflicts(conflicts)], dict.fromkeys(_SIMULATED[:2], Evidence(kind="simulated", source=source))
        values: dict[str, Value] = {}
        if conflicts is not None and parts[0]["wavefronts"].notna().any():
            counted = ("wavefronts", "conflicts", "wavefront_error", "conflict_error")
            evidence |= dict.fromkeys(counted, conflicts.evidence())
            values |= _errors(parts[0])
        else:
            parts[0] = parts[0][["part", *_CASE, *_SIMULATED[:2]]]
        if occupancy is not None:
            parts.append(_blocks(occupancy))
            evidence["simulated_blocks"] = Evidence(kind="simulated", source=source)
            evidence |= dict.fromkeys(("driver_blocks", "configurations"), occupancy.evidence())
            equal = int(occupancy.data["equal"].sum())
            values["occupancy_equal"] = Value(float(equal), "configurations", "configurations")
            values["occupancy_configurations"] = Value(float(len(occupancy.data)), "configurations", "configurations")
        found = [simulator_errors.of_bank_conflicts(parameters.gpu), simulator_errors.of_occupancy(parameters.gpu)]
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=pd.concat(parts, ignore_index=True),
            evidence=evidence,
            values=values,
            inputs=[one for _, inputs in found for one in inputs],
            notes=[note for note, _ in found],
        )


def _conflicts(record: Record | None) -> pd.DataFrame:
    """Return the record's cases, or the simulated half of them where there is none."""
    data = record.data if record is not None else pd.DataFrame([simulated(case) for case in cases()])
    columns = [*_CASE, *_SIMULATED[:2], "wavefronts", "conflicts", "wavefront_error", "conflict_error"]
    return data.reindex(columns=columns).assign(part="bank_conflicts")


def _blocks(record: Record) -> pd.DataFrame:
    sizes = record.data.groupby(["simulated_blocks", "driver_blocks"]).size()
    return sizes.rename("configurations").reset_index().assign(part="occupancy")


def _errors(data: pd.DataFrame) -> dict[str, Value]:
    counted = data[data["wavefronts"].notna()]
    found: dict[str, tuple[Any, str, str]] = {"cases": (len(counted), "cases", "wavefronts")}
    for what in ("wavefront", "conflict"):
        error = 100 * counted[f"{what}_error"].abs()
        found[f"{what}_error_max_percent"] = (error.max(), "%", f"{what}_error")
        found[f"{what}_error_mean_percent"] = (error.mean(), "%", f"{what}_error")
    return {name: Value(float(value), unit, column) for name, (value, unit, column) in found.items()}
