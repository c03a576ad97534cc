"""Compiles the kernel of `cq_encode` for one GPU architecture, without a GPU: ``... 90 '[{"vector_size": 2}]' FOLDER``.

Prints one JSON object per case: registers, bytes spilled, shared memory, and its instructions by kind. A process of its own,
because Triton's compiler and its interpreter do not share one.
"""

import collections
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from mixed_decode_compiled import TYPES, Recorder, describe, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wqlab.ops.cq_encode import triton_kernel

TYPES[torch.int16] = "*i16"  # codes of two books
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_]+)", re.MULTILINE)
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


class OptionsRecorder(Recorder):
    """Keeps the compiler's options apart from the kernel's constants."""

    def launch(self, *args, maxnreg, **rest):
        super().launch(*args, **rest)
        self.options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": maxnreg}


def compiled(recorder, architecture):
    names, constants, attributes = recorder.kernel.arg_names, {}, {}
    signature = {n: describe(v, (i,), constants, attributes) for i, (n, v) in enumerate(zip(names, recorder.args, strict=False))}
    for name, value in recorder.constants.items():
        signature[name], constants[(names.index(name),)] = "constexpr", value
    source = ASTSource(recorder.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=recorder.options)


def instructions(kernel, folder):
    """Return how many machine instructions of each kind the kernel has."""
    cubin = Path(folder) / "kernel_sass.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    said = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return dict(collections.Counter(INSTRUCTION.findall(said)))


def main(architecture, cases, folder):
    for case in cases:
        size, groups = case["vector_size"], case.get("groups", 16)
        tiling = triton_kernel.Tiling(*case["tiling"]) if "tiling" in case else triton_kernel.TILINGS[size]
        x = torch.randn(1, 1, 64, groups * size).to(getattr(torch, case.get("dtype", "float16")))
        prepared = triton_kernel.prepare(torch.randn(1, groups, 256, size), x.dtype, tiling.classes)
        recorder = OptionsRecorder(triton_kernel._encode_kernel)
        triton_kernel._encode_kernel = recorder
        triton_kernel.encode(x, prepared, tiling)
        triton_kernel._encode_kernel = recorder.kernel
        kernel = compiled(recorder, architecture)
        found = {"case": case, **resources(kernel, architecture, folder), "instructions": instructions(kernel, folder)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
