"""Compiled kernels on a device, launched through the CUDA driver on torch's streams.

A launch neither waits nor allocates device memory, so CUDA graphs can record it. The driver is called directly: cuda.core's
launch would wrap stream, configuration and each argument again every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wqlab.codegen.arguments import Arguments
from wqlab.codegen.compile import Compiled
from wqlab.errors import KernelError, MissingPartError, ParameterError, UnknownNameError

if TYPE_CHECKING:
    import torch

#: Shared memory, static and dynamic together, that a kernel may use without asking.
_SHARED_WITHOUT_ASKING = 48 * 1024

_loaded: dict[tuple[str, str, int], Kernel] = {}
_loading = threading.Lock()


class Kernel:
    """A kernel on one device; made by `load`.

    Parameters
    ----------
    arguments : Arguments
        Name, device and parameters.
    driver : module
        ``cuda.bindings.driver``.
    context, function : object
        The device's primary context, and the function in it.
    shared_limit : int
        Dynamic shared memory that a block can have, in bytes.
    shared_allowed : int
        Dynamic shared memory that it can have without asking, in bytes; more is asked for when it is first needed.
    current_stream : callable
        Gives torch's current stream on a device.
    """

    def __init__(
        self,
        arguments: Arguments,
        *,
        driver: Any,
        context: Any,
        function: Any,
        shared_limit: int,
        shared_allowed: int,
        current_stream: Callable[[int], torch.cuda.Stream],
    ) -> None:
        self.name, self.device = arguments.name, arguments.device
        self._arguments = arguments
        self._driver, self._context, self._function = driver, context, function
        self._shared_limit, self._shared_allowed = shared_limit, shared_allowed
        self._current_stream = current_stream

    def launch(
        self,
        stream: torch.cuda.Stream | int | None,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        *args: object,
    ) -> None:
        """Queue the kernel on a stream and return at once.

        Parameters
        ----------
        stream : torch.cuda.Stream, int or None
            A stream of this device, or its handle; None is torch's current one.
        grid, block : sequence of int
            One to three dimensions, x first.
        shared_bytes : int
            Dynamic shared memory per block.
        *args
            One for each parameter: a tensor of this device (its pointer; the caller keeps it alive and contiguous), None (a null
            pointer), a ctypes or numpy scalar (an int needs one, so that its width is known), a ctypes structure (by value), or a
            float (``float`` in C).

        Raises
        ------
        ParameterError
            For arguments that do not fit the kernel's parameters, or more shared memory than a block can have.
        KernelError
            When the driver refuses the launch.
        """
        values = self._arguments.place(args)
        gx, gy, gz = (*grid, 1, 1)[:3]
        bx, by, bz = (*block, 1, 1)[:3]
        if stream is None:
            stream = self._current_stream(self.device)
        handle = stream if isinstance(stream, int) else stream.cuda_stream
        driver = self._driver
        # A thread of its own, or one that works on another device, does not have this device's context.
        _checked(driver.cuCtxPushCurrent(self._context), "cannot use the device's context")
        try:
            if shared_bytes > self._shared_allowed:
                self._allow(shared_bytes)
            result = driver.cuLaunchKernel(self._function, gx, gy, gz, bx, by, bz, shared_bytes, handle, values, 0)
        finally:
            driver.cuCtxPopCurrent()
        if result[0].value:
            _checked(result, f"cannot launch kernel {self.name} with grid {gx, gy, gz}, block {bx, by, bz}")

    def resident_blocks(self, threads: int, shared_bytes: int = 0, carve_out: int | None = None) -> int:
        """Return how many blocks the driver says that a multiprocessor holds at once.

        Parameters
        ----------
        threads : int
            Per block.
        shared_bytes : int
            Dynamic shared memory per block.
        carve_out : int, optional
            Preferred share of the largest carve-out, in percent; it stays with the kernel until the next call. None: no preference.

        Raises
        ------
        ParameterError
            For more shared memory than a block can have.
        KernelError
            When the driver refuses the question.
        """
        driver, what = self._driver, f"cannot ask for the occupancy of kernel {self.name}"
        prefer = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _checked(driver.cuCtxPushCurrent(self._context), "cannot use the device's context")
        try:
            if shared_bytes > self._shared_allowed:
                self._allow(shared_bytes)
            _checked(driver.cuFuncSetAttribute(self._function, prefer, -1 if carve_out is None else carve_out), what)
            return int(_checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared_bytes), what))
        finally:
            driver.cuCtxPopCurrent()

    def _allow(self, shared_bytes: int) -> None:
        if shared_bytes > self._shared_limit:
            raise ParameterError(
                f"kernel {self.name}: shared_bytes = {shared_bytes}, but a block on cuda:{self.device} has at most "
                f"{self._shared_limit} beside the kernel's static shared memory; choose smaller tiles"
            )
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        what = f"cannot give kernel {self.name} {shared_bytes} bytes of shared memory"
        _checked(self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), what)
        self._shared_allowed = shared_bytes


def load(compiled: Compiled, kernel_name: str, device: torch.device | str | int) -> Kernel:
    """Return a kernel on a device; it is loaded once, and then the same object comes back.

    Load before a CUDA graph is recorded: loading may wait for the device, launching does not.

    Parameters
    ----------
    compiled : Compiled
        For this device's architecture.
    kernel_name : str
        One of ``compiled.usage``.
    device : torch.device, str or int
        A CUDA device; without an index the current one.

    Raises
    ------
    UnknownNameError
        For a kernel that the source does not hold.
    ParameterError
        For a device that is not a CUDA device.
    MissingPartError
        Without a CUDA device or the package cuda-bindings.
    KernelError
        When the driver refuses the code, for example that of another architecture.
    """
    if kernel_name not in compiled.usage:
        raise UnknownNameError("kernel", kernel_name, compiled.usage)
    index = _index(device)
    key = compiled.key, kernel_name, index
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load(compiled, kernel_name, index)
        return _loaded[key]


def _index(device: torch.device | str | int) -> int:
    import torch

    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        raise ParameterError(f"device = {str(place)!r}: a compiled kernel runs on CUDA devices only; name one, such as 'cuda:0'")
    if not torch.cuda.is_available():
        raise MissingPartError("a compiled kernel needs a CUDA device, and torch finds none; run on a machine that has one")
    return torch.cuda.current_device() if place.index is None else place.index


def _load(compiled: Compiled, name: str, index: int) -> Kernel:
    import torch

    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingPartError(f"kernels need the package cuda-bindings ({error}); install it: pip install 'wqlab[gpu]'") from error
    major, minor = torch.cuda.get_device_capability(index)
    what = f"cannot load kernel {name}, compiled for {compiled.arch}, on cuda:{index}, which is sm_{major}{minor}"
    _checked(driver.cuInit(0), what)
    place = _checked(driver.cuDeviceGet(index), what)
    context = _checked(driver.cuDevicePrimaryCtxRetain(place), what)  # the one that torch uses; kept as long as the process
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = _checked(driver.cuDeviceGetAttribute(attribute, place), what)
    _checked(driver.cuCtxPushCurrent(context), what)
    try:
        module = _checked(driver.cuModuleLoadData(compiled.cubin), what)
        function = _checked(driver.cuModuleGetFunction(module, name.encode()), what)
        # The driver loads lazily, and must not do so while a graph is recorded.
        _checked(driver.cuFuncLoad(function), what)
        sizes: list[int] = []
        while (size := driver.cuFuncGetParamInfo(function, len(sizes)))[0] == driver.CUresult.CUDA_SUCCESS:
            sizes.append(size[2])
        if size[0] != driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # which says: there are no more
            _checked(size, what)
    finally:
        driver.cuCtxPopCurrent()
    return Kernel(
        Arguments(name, index, sizes),
        driver=driver,
        context=context,
        function=function,
        shared_limit=most - compiled.usage[name].shared_bytes,
        shared_allowed=_SHARED_WITHOUT_ASKING - compiled.usage[name].shared_bytes,
        current_stream=torch.cuda.current_stream,
    )


def _checked(result: tuple[Any, ...], what: str) -> Any:
    error, *values = result
    if error.value:
        raise KernelError(
            f"{what}: the driver says {error.name}. If an earlier kernel may be the cause, run again with CUDA_LAUNCH_BLOCKING=1"
        )
    return values[0] if values else None
