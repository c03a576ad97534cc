"""CUDA C++ to loaded kernels: `render` a template of ``kernels/``, `compile_cubin` it with NVRTC, `load` it on a device.

Rendering and compiling need no GPU; registers, shared memory and spills are known once a kernel is compiled.
"""

from wqlab.codegen.compile import Compiled, compile_cubin
from wqlab.codegen.load import Kernel, load
from wqlab.codegen.render import render
from wqlab.codegen.usage import Usage

__all__ = ["Compiled", "Kernel", "Usage", "compile_cubin", "load", "render"]
