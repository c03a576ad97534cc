"""VQ-LLM's Fig. 10: resident warps against registers and shared memory, the slack of a kernel, and what it holds of a codebook."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wqlab.errors import ParameterError
from wqlab.experiments import Experiment, Parameters, simulator_errors, slider
from wqlab.registry import register
from wqlab.simulate import gpus
from wqlab.simulate.occupancy import blocks_by_resource, occupancy
from wqlab.types import Evidence, Result, Value

#: Bytes of shared memory between two points of the curve, and a register's.
_STEP, _REGISTER_BYTES = 1024, 4


class OccupancySlackParameters(Parameters):
    """Parameters of `occupancy_slack`: a kernel, and the GPU of the curves.

    Parameters
    ----------
    gpu : str
        Whose curves are drawn; the slack is shown for all.
    threads : int
        Per block.
    registers : int
        Per thread.
    shared_kb : int
        Shared memory per block, static and dynamic, in KB of 1,024 bytes.
    entry_bytes : int
        Of the codebook whose entries the slack is counted in.
    """

    gpu: Literal["rtx4090", "a40", "a100", "a800", "h100", "h200", "l40s"] = Field("h200", description="whose curves are drawn")
    threads: int = slider(128, 32, 1024, 32, "threads per block", ge=1, le=1024)
    registers: int = slider(100, 16, 255, 1, "registers per thread", ge=1, le=255)
    shared_kb: int = slider(8, 0, 99, 1, "KB of shared memory per block", ge=0, le=227)
    entry_bytes: int = slider(8, 2, 64, 2, "bytes of a codebook's entry", ge=1, le=4096)


@register("stem", "occupancy_slack")
class OccupancySlack(Experiment[OccupancySlackParameters]):
    """Curves of one GPU, and the slack on all of them, by `wqlab.simulate.occupancy`."""

    stem = "occupancy_slack"
    title = "Occupancy and its slack"
    paper = "VQ-LLM, Sect. V, Fig. 10"
    Parameters = OccupancySlackParameters

    def run(self, parameters: OccupancySlackParameters) -> Result:
        """Compute a table of three parts.

        Returns
        -------
        Result
            ``part == "registers"``: resident ``warps`` per multiprocessor against registers per thread. ``"shared memory"``:
            against shared memory per block. ``"gpu"``: per GPU the kernel's blocks, warps, limiter, both kinds of slack, and the
            entries of a codebook that each holds; in registers every thread has its own.

        Raises
        ------
        ParameterError
            When the kernel has more shared memory than a block of the GPU; the other GPUs then say "does not fit".
        """
        import pandas as pd

        p = parameters
        chosen, shared = gpus.gpu(p.gpu), p.shared_kb * 1024
        here = occupancy(chosen, p.registers, p.threads, shared)
        rows: list[dict[str, object]] = []
        for registers in range(1, chosen.max_registers_per_thread + 1):
            warps = _resident(chosen, registers, p.threads, shared)
            rows.append({"part": "registers", "gpu": p.gpu, "registers": registers, "warps": warps})
        for size in range(0, chosen.shared_bytes_per_block + 1, _STEP):
            warps = _resident(chosen, p.registers, p.threads, size)
            rows.append({"part": "shared memory", "gpu": p.gpu, "shared_kb": size / 1024, "warps": warps})
        for key, gpu in gpus.GPUS.items():
            row: dict[str, object] = {"part": "gpu", "gpu": key, "name": gpu.name, "max_warps": gpu.max_warps_per_sm}
            try:
                found = occupancy(gpu, p.registers, p.threads, shared)
            except ParameterError:
                rows.append({**row, "limiter": f"does not fit: at most {gpu.shared_bytes_per_block // 1024} KB per block"})
                continue
            rows.append(
                {
                    **row, "blocks": found.blocks, "warps": found.warps, "limiter": ", ".join(found.limiters),
                    "register_slack": found.register_slack, "shared_slack_kb": found.shared_slack_bytes / 1024,
                    "entries_in_registers": found.register_slack * _REGISTER_BYTES // p.entry_bytes,
                    "entries_in_shared": found.shared_slack_bytes // p.entry_bytes,
                }
            )  # fmt: skip
        note, inputs = simulator_errors.of_occupancy()
        columns = (
            "warps", "blocks", "limiter", "register_slack", "shared_slack_kb", "entries_in_registers", "entries_in_shared",
        )  # fmt: skip
        numbers = {
            "blocks": (here.blocks, "blocks"), "warps": (here.warps, "warps"),
            "register_slack": (here.register_slack, "registers per thread"),
            "shared_slack_kb": (here.shared_slack_bytes / 1024, "KB per block"),
        }  # fmt: skip
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=pd.DataFrame(rows),
            evidence=dict.fromkeys(
                columns, Evidence(kind="simulated", source="wqlab.simulate.occupancy, CUDA's occupancy function")
            ),
            values={name: Value(float(value), unit, name) for name, (value, unit) in numbers.items()},
            inputs=inputs,
            notes=[
                note,
                f"The kernel: {p.threads} threads, {p.registers} registers, {p.shared_kb} KB of shared memory per block. Slack is "
                "what a block can have more without the multiprocessor (SM) holding one fewer; entries have "
                f"{p.entry_bytes} bytes.",
            ],
        )


def _resident(gpu: gpus.GPUSpec, registers: int, threads: int, shared_bytes: int) -> int:
    return min(blocks_by_resource(gpu, registers, threads, shared_bytes).values()) * -(-threads // gpu.warp_size)
