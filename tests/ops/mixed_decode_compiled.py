"""Compiles the kernels of `mixed_decode` for one GPU architecture, without a GPU: ``... 90 '[{"head_dim": 64}]' FOLDER``.

Prints one JSON object per case, which is what `build` is asked for: registers, bytes spilled and shared memory of both
kernels, and the products on tensor cores of the first. Segments without tokens are left out. A process of its own, because
Triton's compiler and its interpreter do not share one.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from mixed_decode_cases import build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wqlab.ops.mixed_decode import MixedKV, triton_kernel

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32"}
TYPES[torch.int64] = "*i64"
#: A product on tensor cores of half precision: its terms, and how many neighbours among them a lane holds.
PRODUCT = re.compile(r"tt\.dot .*?: tensor<\d+x(\d+)xb?f16, #ttg\.dot_op<\{opIdx = 0, parent = #mma\d*, kWidth = (\d+)\}>>")
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


class Recorder:
    """Stands for a kernel: keeps what it would have been launched with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, num_stages=3, **constants):
        self.args, self.constants, self.num_warps, self.num_stages = args, constants, num_warps, num_stages


def describe(value, path, constants, attributes):
    """Return the type of one argument as Triton's launcher sees it: 1 and None are constants, multiples of 16 are known as such."""
    if isinstance(value, tuple):
        return tuple(describe(v, (*path, i), constants, attributes) for i, v in enumerate(value))
    if value is None or (isinstance(value, int) and value == 1 and len(path) > 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, torch.Tensor) or (len(path) > 1 and value % 16 == 0):
        attributes[path] = [["tt.divisibility", 16]]
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def compiled(recorder, architecture):
    names, constants, attributes = recorder.kernel.arg_names, {}, {}
    signature = {n: describe(v, (i,), constants, attributes) for i, (n, v) in enumerate(zip(names, recorder.args, strict=False))}
    for name, value in recorder.constants.items():
        signature[name], constants[(names.index(name),)] = "constexpr", value
    source = ASTSource(recorder.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": recorder.num_warps, "num_stages": recorder.num_stages},
    )


def resources(kernel, architecture, folder):
    ptx = Path(folder) / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"], encoding="utf-8")
    suffix = "a" if architecture >= 90 else ""
    command = [PTXAS, "-v", f"-arch=sm_{architecture}{suffix}", ptx, "-o", ptx.with_suffix(".cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return {"registers": int(re.search(r"Used (\d+) registers", said)[1]), "spilled": spilled, "shared": kernel.metadata.shared}


def main(architecture, cases, folder):
    for case in cases:
        sizes = {"batch": 2, "kv_heads": 2, "dense": 32, "int4": 64, "int2": 64, "tail": 96} | case
        query, cache = build(**sizes | {"dtype": getattr(torch, case.get("dtype", "float16"))})
        cache = MixedKV(tuple(s for s in cache.segments if s.tokens), cache.tail)
        partial, combine = Recorder(triton_kernel._partial_kernel), Recorder(triton_kernel._combine_kernel)
        triton_kernel._partial_kernel, triton_kernel._combine_kernel = partial, combine
        triton_kernel.attend(query, cache, 1.0)
        triton_kernel._partial_kernel, triton_kernel._combine_kernel = partial.kernel, combine.kernel
        found = {"case": case, "warps": partial.num_warps}
        for name, recorder in (("partial", partial), ("combine", combine)):
            kernel = compiled(recorder, architecture)
            found[name] = resources(kernel, architecture, folder)
            if name == "partial":
                found["products"] = [(int(terms), int(width)) for terms, width in PRODUCT.findall(kernel.asm["ttgir"])]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
