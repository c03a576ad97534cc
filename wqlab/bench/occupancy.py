"""Occupancy as simulated and as the CUDA driver tells it, for kernels of many register counts and every size of block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wqlab.bench import Bench, Headline
from wqlab.errors import KernelError, LimitError, MissingPartError
from wqlab.registry import register
from wqlab.simulate import gpus
from wqlab.simulate.occupancy import occupancy

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.codegen import Compiled

#: Values that a kernel holds, and its static shared memory in bytes: on sm_90 about 16 to 255 registers.
KERNELS = (
    *((values, 0) for values in (1, 4, 8, 12, 16, 20, 24, 32, 40, 52, 64, 84, 100)), (4, 1), (12, 1000), (28, 5000),
)  # fmt: skip
THREADS = (1, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 992, 1024)
#: Dynamic shared memory in bytes; some are what a whole number of blocks just fits into.
SHARED = (0, 100, 6272, 13568, 32128, 49152, 57344, 75000, 115712, 212000)
#: Preferred carve-outs in percent, asked for one size of blocks.
CARVE_OUTS = (0, 10, 50, 100)
_QUICK = slice(None, None, 5)


def source(kernels: tuple[tuple[int, int], ...] = KERNELS) -> str:
    """Return the CUDA C++ of all kernels."""
    from wqlab import codegen

    return codegen.render("occupancy", kernels=kernels)


@register("bench", "occupancy")
class OccupancyBench(Bench):
    """Asks the driver; nothing is launched."""

    name = "occupancy"
    description = "blocks per multiprocessor, simulated and as the driver's occupancy function tells them (10 s, a GPU)"
    columns = {  # noqa: RUF012
        "kernel": "of kernels/occupancy.cu.j2",
        "registers": "per thread, as compiled for this GPU",
        "threads": "per block",
        "static_shared_bytes": "static shared memory per block",
        "dynamic_shared_bytes": "dynamic shared memory per block",
        "carve_out": "preferred share of the largest carve-out, percent; empty: no preference",
        "simulated_blocks": "per multiprocessor, by wqlab.simulate.occupancy",
        "limiter": "the resources that limit the simulated blocks",
        "driver_blocks": "per multiprocessor, by cuOccupancyMaxActiveBlocksPerMultiprocessor; 0 also where it refuses, see note",
        "equal": "whether both are the same",
        "note": "what the driver said where it refused the question, else empty",
        "gpu_row": "whether the driver reports the limits that wqlab.simulate.gpus has for this GPU, else which differ",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per kernel, size of block, shared memory and carve-out.

        Raises
        ------
        MissingPartError
            Without a CUDA device: there is no driver to ask.
        UnknownNameError
            For a GPU that `wqlab.simulate.gpus` has no row of.
        """
        import pandas as pd
        import torch

        if not torch.cuda.is_available():
            raise MissingPartError(
                "occupancy asks the CUDA driver, and torch finds no CUDA device; run it on a machine that has one"
            )
        from wqlab import codegen
        from wqlab.profile import environment

        spec = gpus.gpu(environment.gpu_key())
        major, minor = torch.cuda.get_device_capability()
        compiled = codegen.compile_cubin(source(), arch=f"sm_{major}{minor}")
        told = limits_told(spec)
        rows = []
        for values, shared in KERNELS[_QUICK] if quick else KERNELS:
            rows += [{**row, "gpu_row": told} for row in _rows(spec, compiled, f"occupancy_{values}_{shared}", quick)]
        data = pd.DataFrame(rows)
        data["carve_out"] = data["carve_out"].astype("Int64")
        return data[list(self.columns)]

    def check(self, data: pd.DataFrame) -> None:
        """Raise LimitError where the simulator and the driver differ."""
        wrong = data[~data["equal"]]
        if len(wrong):
            shown = ["kernel", "registers", "threads", "dynamic_shared_bytes", "carve_out", "simulated_blocks", "driver_blocks"]
            raise LimitError(f"{len(wrong)} of {len(data)} configurations differ, the first:\n{wrong[shown].head(5).to_string()}")
        if (data["gpu_row"] != "as reported").any():
            raise LimitError(f"wqlab/simulate/gpus.py: {data['gpu_row'].iloc[0]}; correct the row")

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return how many configurations are equal."""
        metric = f"configurations of {len(data):,} whose simulated occupancy is the driver's"
        return [Headline(metric, float(data["equal"].sum()), None, "1")]


def _rows(spec: gpus.GPUSpec, compiled: Compiled, name: str, quick: bool) -> list[dict[str, Any]]:
    from wqlab import codegen

    kernel, usage = codegen.load(compiled, name, "cuda"), compiled.usage[name]
    cases: list[tuple[int, int, int | None]] = [(threads, size, None) for threads in THREADS for size in SHARED]
    cases += [(64, size, part) for size in SHARED for part in CARVE_OUTS]
    rows: list[dict[str, Any]] = []
    for threads, size, part in cases[_QUICK] if quick else cases:
        total = size + usage.shared_bytes
        if total > spec.shared_bytes_per_block:  # it cannot be asked for
            continue
        found = occupancy(spec, usage.registers, threads, total, part)
        driver, note = 0, ""
        try:
            driver = kernel.resident_blocks(threads, size, part)
        except KernelError as refused:  # a block that cannot be launched
            note = f"refused: {refused}"
        rows.append(
            {
                "kernel": name, "registers": usage.registers, "threads": threads, "static_shared_bytes": usage.shared_bytes,
                "dynamic_shared_bytes": size, "carve_out": part, "simulated_blocks": found.blocks,
                "limiter": ", ".join(found.limiters), "driver_blocks": driver, "equal": found.blocks == driver,
                "note": note,
            }
        )  # fmt: skip
    return rows


def limits_told(spec: gpus.GPUSpec) -> str:
    """Return ``as reported`` when the driver reports what the row says, else what differs."""
    import torch
    from cuda.bindings import driver

    names = {
        "num_sms": "MULTIPROCESSOR_COUNT", "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
        "registers_per_block": "MAX_REGISTERS_PER_BLOCK", "shared_bytes_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
        "shared_bytes_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "shared_reserved_bytes": "RESERVED_SHARED_MEMORY_PER_BLOCK",
        "shared_without_asking_bytes": "MAX_SHARED_MEMORY_PER_BLOCK", "max_threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
        "max_threads_per_block": "MAX_THREADS_PER_BLOCK", "max_blocks_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
        "l2_bytes": "L2_CACHE_SIZE", "warp_size": "WARP_SIZE",
    }  # fmt: skip
    different = []
    device = driver.cuDeviceGet(torch.cuda.current_device())[1]
    for name, attribute in names.items():
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        error, value = driver.cuDeviceGetAttribute(key, device)
        if error.value:
            raise KernelError(f"the driver does not tell {attribute}: it says {error.name}")
        if value != getattr(spec, name):
            different.append(f"{name}: the row has {getattr(spec, name)}, the driver reports {value}")
    return "; ".join(different) or "as reported"
