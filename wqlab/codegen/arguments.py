"""The arguments of a launch, placed where the CUDA driver reads them.

What fits where is decided once per kernel and combination of Python types; each launch then packs its values with one call.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from wqlab.errors import ParameterError

#: Scalar type -> its code in `struct`; the codes' sizes are those of C.
_CODES: dict[type, str] = {
    **{
        scalar: code
        for ctype, code in (
            (ctypes.c_bool, "?"), (ctypes.c_int8, "b"), (ctypes.c_uint8, "B"), (ctypes.c_int16, "h"), (ctypes.c_uint16, "H"),
            (ctypes.c_int32, "i"), (ctypes.c_uint32, "I"), (ctypes.c_int64, "q"), (ctypes.c_uint64, "Q"), (ctypes.c_float, "f"),
            (ctypes.c_double, "d"),
        )
        for scalar in (ctype, np.dtype(ctype).type)
    },
    float: "f",
    type(None): "Q",
}  # fmt: skip


def _slot(size: int) -> int:
    """Return the bytes that an argument of `size` bytes takes: every one begins at a multiple of 8."""
    return -(-size // 8) * 8


class _Plan(NamedTuple):
    pack: Callable[..., None]
    getters: list[Callable[[Any], Any]]


class _Block(threading.local):
    """Slots and the pointers to them: one set per thread, used again by every launch, since the driver copies the values."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        starts = [0, *accumulate(map(_slot, sizes))]
        self.slots = (ctypes.c_uint64 * (starts[-1] // 8 + 1))()
        first = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * len(starts))(*(first + start for start in starts))
        self.address = ctypes.addressof(self.pointers)


class Arguments:
    """The parameters of one kernel on one device.

    Parameters
    ----------
    name : str
        The kernel's name, for messages.
    device : int
        The CUDA device on which tensors must lie.
    sizes : sequence of int
        Bytes of each parameter, as the driver tells them.
    """

    def __init__(self, name: str, device: int, sizes: Sequence[int]) -> None:
        self.name, self.device, self.sizes = name, device, tuple(sizes)
        self._plans: dict[tuple[type, ...], _Plan] = {}
        self._block = _Block(self.sizes)

    def place(self, args: tuple[object, ...]) -> int:
        """Write the values into this thread's slots and return the address of the pointers to them.

        Raises
        ------
        ParameterError
            For a wrong count, type or width, which would make the driver read beyond a value, or a tensor of another device.
        """
        kinds = tuple(map(type, args))
        plan = self._plans.get(kinds)
        if plan is None:
            plan = self._plans[kinds] = self._plan(args)
        block = self._block
        plan.pack(block.slots, 0, *[get(value) for get, value in zip(plan.getters, args, strict=True)])
        return block.address

    def _plan(self, args: tuple[object, ...]) -> _Plan:
        if len(args) != len(self.sizes):
            raise ParameterError(f"kernel {self.name} takes {len(self.sizes)} arguments, and {len(args)} were given")
        layout, getters = "", []
        for position, (value, size) in enumerate(zip(args, self.sizes, strict=True)):
            code, getter = self._kind(position, value)
            width = struct.calcsize(code)
            if width != size:
                raise ParameterError(
                    f"kernel {self.name}, argument {position}: {value!r} has {width} bytes and the parameter {size}; "
                    "pass a ctypes or numpy value of that width"
                )
            layout += f"{code}{_slot(width) - width}x"
            getters.append(getter)
        return _Plan(struct.Struct(f"={layout}").pack_into, getters)

    def _kind(self, position: int, value: object) -> tuple[str, Callable[[Any], Any]]:
        """Return the code in `struct` for a value, and what takes the number to write from a value of its type."""
        if hasattr(value, "data_ptr"):

            def pointer(tensor: Any) -> int:
                if tensor.get_device() != self.device:
                    raise ParameterError(
                        f"kernel {self.name}, argument {position}: the tensor lies on {tensor.device} and the kernel on "
                        f"cuda:{self.device}; move one of them"
                    )
                return int(tensor.data_ptr())

            return "Q", pointer
        if isinstance(value, ctypes.Structure):
            return f"{ctypes.sizeof(value)}s", bytes
        code = _CODES.get(type(value))
        if code is None:
            raise ParameterError(
                f"kernel {self.name}, argument {position}: {value!r} ({type(value).__name__}) has no known width; pass a tensor, a "
                "float, or a scalar such as ctypes.c_int32(n) or numpy.int32(n)"
            )
        if value is None:
            return code, lambda _: 0
        return code, attrgetter("value") if isinstance(value, ctypes._SimpleCData) else lambda number: number
