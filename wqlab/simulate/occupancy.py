"""Blocks that a multiprocessor holds at once, what limits them, and what a block can take more without losing one.

The arithmetic is that of ``cudaOccupancyMaxActiveBlocksPerMultiprocessor`` (NVIDIA's ``cuda_occupancy.h``): registers go to warps
in multiples of 256, each of the four sub-partitions holds whole warps, and shared memory goes to blocks in multiples of 128 bytes
with 1 KB for the driver. The slack is what VQ-LLM (Sect. V, Fig. 10) fills with codebook entries.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from wqlab.errors import ParameterError
from wqlab.simulate.gpus import GPUSpec


@dataclass(frozen=True)
class Occupancy:
    """What a multiprocessor holds of one kernel.

    Parameters
    ----------
    blocks : int
        Resident blocks per multiprocessor; 0: such a block cannot be launched.
    warps : int
        Resident warps per multiprocessor.
    fraction : float
        Of the warps that the multiprocessor can hold.
    limits : dict of str to int
        Blocks that each resource allows: ``registers``, ``shared memory``, ``warps``, ``blocks``.
    limiters : tuple of str
        The resources whose limit is `blocks`.
    register_slack : int
        Registers per thread that can be added without losing a block.
    shared_slack_bytes : int
        Shared memory per block, in bytes, that can be added without losing a block.
    """

    blocks: int
    warps: int
    fraction: float
    limits: dict[str, int]
    limiters: tuple[str, ...]
    register_slack: int
    shared_slack_bytes: int


def occupancy(gpu: GPUSpec, registers: int, threads: int, shared_bytes: int = 0, carve_out: int | None = None) -> Occupancy:
    """Return how many blocks of a kernel a multiprocessor holds, and what is left.

    Parameters
    ----------
    gpu : GPUSpec
        From `wqlab.simulate.gpus.gpu`.
    registers : int
        Per thread, as the compiler reports it.
    threads : int
        Per block.
    shared_bytes : int
        Static and dynamic shared memory per block. Above `gpu.shared_without_asking_bytes` the kernel is taken to have asked for it
        (``cudaFuncAttributeMaxDynamicSharedMemorySize``); CUDA's function answers 0 for one that has not.
    carve_out : int, optional
        The kernel's preferred carve-out in percent of the largest (``cudaFuncAttributePreferredSharedMemoryCarveout``); None: no
        preference, which is the largest here as in CUDA's function.

    Raises
    ------
    ParameterError
        For a value below zero or above the GPU's limit; names both.
    """
    limits = blocks_by_resource(gpu, registers, threads, shared_bytes, carve_out)
    warps = _warps(gpu, threads)
    blocks = min(limits.values())
    register_slack = shared_slack = 0
    if blocks:
        # More of a resource never gives more blocks, so the first size that loses one can be searched by halving.
        most = range(registers, gpu.max_registers_per_thread + 1)
        register_slack = bisect_left(most, True, key=lambda r: _by_registers(gpu, r, warps) < blocks) - 1
        # The last unit of what is allocated is filled first, then whole units follow.
        taken, unit = shared_bytes + gpu.shared_reserved_bytes, gpu.shared_unit_bytes
        full = _up(taken, unit) - gpu.shared_reserved_bytes
        sizes = range(full, gpu.shared_bytes_per_block + 1, unit)
        fits = bisect_left(sizes, True, key=lambda size: _by_shared(gpu, size, carve_out) < blocks)
        shared_slack = sizes[fits - 1] - shared_bytes
    return Occupancy(
        blocks=blocks,
        warps=blocks * warps,
        fraction=blocks * warps / gpu.max_warps_per_sm,
        limits=limits,
        limiters=tuple(name for name, limit in limits.items() if limit == blocks),
        register_slack=register_slack,
        shared_slack_bytes=shared_slack,
    )


def blocks_by_resource(
    gpu: GPUSpec, registers: int, threads: int, shared_bytes: int = 0, carve_out: int | None = None
) -> dict[str, int]:
    """Return the blocks per multiprocessor that each resource allows; the least of them is what it holds.

    Parameters and errors are those of `occupancy`.
    """
    _check(gpu, "registers", registers, gpu.max_registers_per_thread, "registers per thread")
    _check(gpu, "threads", threads, gpu.max_threads_per_block, "threads per block", least=1)
    _check(gpu, "shared_bytes", shared_bytes, gpu.shared_bytes_per_block, "bytes of shared memory per block")
    if carve_out is not None:
        _check(gpu, "carve_out", carve_out, 100, "percent")
    warps = _warps(gpu, threads)
    return {
        "registers": _by_registers(gpu, registers, warps),
        "shared memory": _by_shared(gpu, shared_bytes, carve_out),
        "warps": gpu.max_warps_per_sm // warps,
        "blocks": gpu.max_blocks_per_sm,
    }


def _warps(gpu: GPUSpec, threads: int) -> int:
    return -(-threads // gpu.warp_size)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _by_registers(gpu: GPUSpec, registers: int, warps: int) -> int:
    """Return the blocks for which the registers suffice."""
    per_warp = _up(registers * gpu.warp_size, gpu.register_unit)
    if not per_warp:
        return gpu.max_blocks_per_sm
    # The hardware checks a launch as if every sub-partition got the same number of warps.
    if per_warp * _up(warps, gpu.sub_partitions) > gpu.registers_per_block:
        return 0
    return gpu.registers_per_sm // gpu.sub_partitions // per_warp * gpu.sub_partitions // warps


def _by_shared(gpu: GPUSpec, shared_bytes: int, carve_out: int | None) -> int:
    """Return the blocks for which the shared memory suffices."""
    per_block = _up(shared_bytes + gpu.shared_reserved_bytes, gpu.shared_unit_bytes)
    preferred = gpu.shared_bytes_per_sm if carve_out is None else carve_out * gpu.shared_bytes_per_sm // 100
    # A preference is rounded up to a carve-out that exists; one that holds no block is raised until it holds one.
    return _at_least(gpu, max(_at_least(gpu, preferred), per_block)) // per_block


def _at_least(gpu: GPUSpec, size: int) -> int:
    return next(found for found in gpu.carve_outs if found >= size)


def _check(gpu: GPUSpec, name: str, value: int, limit: int, unit: str, least: int = 0) -> None:
    if not least <= value <= limit:
        raise ParameterError(f"{name} = {value}: {gpu.name} has {least} to {limit} {unit}; choose a value between them")
