"""What GPUs have: multiprocessors, registers, shared memory, caches, bandwidth. One row per GPU; a new GPU is a new row."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from wqlab.errors import UnknownNameError

_KB = 1024


@dataclass(frozen=True)
class GPUSpec:
    """One GPU, with the limits that the CUDA programming guide gives for its compute capability.

    Parameters
    ----------
    key : str
        The project's name for it, also the folder of its records.
    name : str
        With the variant: SXM or PCIe, and which memory.
    architecture : str
        NVIDIA's name.
    compute_capability : tuple of int
        Major and minor.
    num_sms : int
        Multiprocessors.
    l1_bytes : int
        L1 cache and shared memory of a multiprocessor together.
    l2_bytes : int
        L2 cache.
    bandwidth_gb_s : float
        Of the memory, in 1e9 bytes per second.
    boost_clock_mhz : int
        Highest clock of the multiprocessors.
    memory_gb : int
        As the datasheet counts it.
    carve_outs : tuple of int
        Bytes per multiprocessor that shared memory can take of the L1, in ascending order.
    max_threads_per_sm, max_blocks_per_sm : int
        Resident at once.
    source : str
        Where this row's own numbers are printed.
    max_threads_per_block, max_registers_per_thread, registers_per_sm, registers_per_block : int
        Limits.
    register_unit : int
        Registers are given to a warp in multiples of this.
    sub_partitions : int
        Of a multiprocessor; each has its share of the registers, and a launch is checked as if its warps came in multiples of it.
    shared_reserved_bytes : int
        That the driver takes of the shared memory for every block.
    shared_unit_bytes : int
        Shared memory is given to a block in multiples of this.
    shared_without_asking_bytes : int
        Shared memory, static and dynamic together, that a block can have without the kernel asking for more.
    num_banks, bank_bytes : int
        Of the shared memory.
    warp_size : int
        Threads.
    """

    key: str
    name: str
    architecture: str
    compute_capability: tuple[int, int]
    num_sms: int
    l1_bytes: int
    l2_bytes: int
    bandwidth_gb_s: float
    boost_clock_mhz: int
    memory_gb: int
    carve_outs: tuple[int, ...]
    max_threads_per_sm: int
    max_blocks_per_sm: int
    source: str = field(repr=False)
    max_threads_per_block: int = 1024
    max_registers_per_thread: int = 255
    registers_per_sm: int = 65536
    registers_per_block: int = 65536
    register_unit: int = 256
    sub_partitions: int = 4
    shared_reserved_bytes: int = 1024
    shared_unit_bytes: int = 128
    shared_without_asking_bytes: int = 48 * _KB
    num_banks: int = 32
    bank_bytes: int = 4
    warp_size: int = 32

    @property
    def shared_bytes_per_sm(self) -> int:
        """Shared memory of a multiprocessor at the largest carve-out, bytes."""
        return self.carve_outs[-1]

    @property
    def shared_bytes_per_block(self) -> int:
        """Most that a block can have, static and dynamic together, when the kernel asks for it; bytes."""
        return self.shared_bytes_per_sm - self.shared_reserved_bytes

    @property
    def max_warps_per_sm(self) -> int:
        """Resident warps of a multiprocessor."""
        return self.max_threads_per_sm // self.warp_size

    @property
    def bytes_per_clock_and_sm(self) -> float:
        """Memory bandwidth per multiprocessor and clock, bytes; at the boost clock."""
        return self.bandwidth_gb_s * 1e9 / (self.num_sms * self.boost_clock_mhz * 1e6)


def _kb(*sizes: int) -> tuple[int, ...]:
    return tuple(size * _KB for size in sizes)


#: By compute capability, from the CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications and shared memory).
_SM80: dict[str, Any] = {
    "architecture": "Ampere", "compute_capability": (8, 0), "l1_bytes": 192 * _KB, "max_threads_per_sm": 2048,
    "max_blocks_per_sm": 32, "carve_outs": _kb(0, 8, 16, 32, 64, 100, 132, 164),
}  # fmt: skip
_SM86: dict[str, Any] = {
    "architecture": "Ampere", "compute_capability": (8, 6), "l1_bytes": 128 * _KB, "max_threads_per_sm": 1536,
    "max_blocks_per_sm": 16, "carve_outs": _kb(0, 8, 16, 32, 64, 100),
}  # fmt: skip
_SM89: dict[str, Any] = _SM86 | {"architecture": "Ada", "compute_capability": (8, 9), "max_blocks_per_sm": 24}
_SM90: dict[str, Any] = {
    "architecture": "Hopper", "compute_capability": (9, 0), "l1_bytes": 256 * _KB, "max_threads_per_sm": 2048,
    "max_blocks_per_sm": 32, "carve_outs": _kb(0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
}  # fmt: skip
_MB = _KB * _KB

_ROWS = (
    GPUSpec(
        key="rtx4090", name="GeForce RTX 4090, 24 GB GDDR6X (PCIe)", num_sms=128, l2_bytes=72 * _MB, bandwidth_gb_s=1008,
        boost_clock_mhz=2520, memory_gb=24,
        source="NVIDIA Ada GPU Architecture white paper, table of the GeForce RTX 4090", **_SM89,
    ),
    GPUSpec(
        key="a40", name="A40, 48 GB GDDR6 (PCIe)", num_sms=84, l2_bytes=6 * _MB, bandwidth_gb_s=696,
        boost_clock_mhz=1740, memory_gb=48,
        source="NVIDIA A40 datasheet and product brief; L2: NVIDIA Ampere GA102 white paper",
        **_SM86,
    ),
    GPUSpec(
        key="a100", name="A100 SXM4, 80 GB HBM2e", num_sms=108, l2_bytes=40 * _MB, bandwidth_gb_s=2039,
        boost_clock_mhz=1410, memory_gb=80,
        source="NVIDIA A100 80 GB datasheet; NVIDIA A100 Tensor Core GPU Architecture white paper",
        **_SM80,
    ),
    GPUSpec(
        key="a800", name="A800 SXM4, 80 GB HBM2e", num_sms=108, l2_bytes=40 * _MB, bandwidth_gb_s=2039,
        boost_clock_mhz=1410, memory_gb=80,
        source="NVIDIA A800 datasheet: an A100 with NVLink at 400 GB/s; the rest as of the A100",
        **_SM80,
    ),
    GPUSpec(
        key="h100", name="H100 SXM5, 80 GB HBM3", num_sms=132, l2_bytes=50 * _MB, bandwidth_gb_s=3350,
        boost_clock_mhz=1980, memory_gb=80,
        source="NVIDIA H100 datasheet (the clock follows from its 67 TFLOPS of FP32); NVIDIA H100 GPU Architecture white paper",
        **_SM90,
    ),
    GPUSpec(
        key="h200", name="H200 SXM5, 141 GB HBM3e", num_sms=132, l2_bytes=60 * _MB, bandwidth_gb_s=4800,
        boost_clock_mhz=1980, memory_gb=141,
        source="NVIDIA H200 datasheet (the clock follows from its 67 TFLOPS of FP32); SMs and L2: what its driver reports",
        **_SM90,
    ),
    GPUSpec(
        key="l40s", name="L40S, 48 GB GDDR6 (PCIe)", num_sms=142, l2_bytes=96 * _MB, bandwidth_gb_s=864,
        boost_clock_mhz=2520, memory_gb=48,
        source="NVIDIA L40S datasheet (the clock follows from its 91.6 TFLOPS of FP32); L2: NVIDIA Ada GPU Architecture white "
        "paper, of the L40, which has the same chip and SMs; some tables on the web print 48 MB",
        **_SM89,
    ),
)  # fmt: skip
GPUS = {row.key: row for row in _ROWS}


def gpu(name: str) -> GPUSpec:
    """Return the GPU of that name; case, spaces, hyphens and NVIDIA's own words before it do not matter.

    Raises
    ------
    UnknownNameError
        With the known names.
    """
    squeezed = re.sub(r"[\s_-]|nvidia|geforce", "", str(name).lower())
    if squeezed not in GPUS:
        raise UnknownNameError("GPU", name, GPUS)
    return GPUS[squeezed]
