"""Arguments become C values of the right width; on a GPU kernels run on torch's streams and in CUDA graphs."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from wqlab.codegen import Compiled, Usage, compile_cubin, load
from wqlab.codegen.arguments import Arguments
from wqlab.codegen.load import Kernel
from wqlab.errors import KernelError, MissingPartError, ParameterError, UnknownNameError

#: Adds a * x to y through dynamic shared memory; n is the count, and the rest of y stays.
AXPY = """
extern "C" __global__ void axpy(float a, const float* x, float* y, long long n) {
    extern __shared__ float tile[];
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) y[i] += a * tile[threadIdx.x];
}
"""


def read(arguments, types, *values):
    """Return the values as the driver would read them."""
    pointers = (ctypes.c_void_p * len(types)).from_address(arguments.place(values))
    return [kind.from_address(pointer).value for kind, pointer in zip(types, pointers, strict=True)]


def test_scalars_get_the_width_that_they_name():
    types = (ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool, ctypes.c_double, ctypes.c_uint8)
    arguments = Arguments("k", 0, [ctypes.sizeof(kind) for kind in types])
    for scalar in (np.int32(-3), ctypes.c_int32(-3)):
        values = 1.5, scalar, ctypes.c_int64(2**40), None, np.bool_(True), np.float64(0.1), ctypes.c_uint8(255)
        assert read(arguments, types, *values) == [1.5, -3, 2**40, None, True, 0.1, 255]
    assert read(arguments, types, 2.5, np.int32(4), np.int64(-1), None, np.bool_(False), np.float64(2), np.uint8(1))[:3] == [
        2.5,
        4,
        -1,
    ]


def test_a_tensor_is_its_pointer():
    tensor = torch.arange(4)[1:]
    assert read(Arguments("k", -1, [8]), [ctypes.c_void_p], tensor) == [tensor.data_ptr()]  # -1 is the CPU


class Shape(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("rows", ctypes.c_int32), ("scale", ctypes.c_float), ("flag", ctypes.c_int8 * 5))


def test_a_structure_is_passed_by_value():
    arguments = Arguments("k", 0, (4, ctypes.sizeof(Shape), 4))
    shape = Shape(7, 3, 0.5, (1, 2, 3, 4, 5))
    pointers = (ctypes.c_void_p * 3).from_address(arguments.place((np.int32(1), shape, np.int32(2))))
    assert [ctypes.c_int32.from_address(pointers[i]).value for i in (0, 2)] == [1, 2]
    assert bytes(Shape.from_address(pointers[1])) == bytes(shape)
    with pytest.raises(ParameterError, match=r"argument 0: .* has 24 bytes and the parameter 4"):
        Arguments("k", 0, (4,)).place((shape,))


def test_a_kernel_without_parameters():
    assert Arguments("k", 0, ()).place(()) != 0


def test_threads_do_not_write_into_each_others_arguments():
    arguments, wrong = Arguments("k", 0, (8, 8)), []

    def work(number):
        for _ in range(2000):
            found = read(arguments, (ctypes.c_int64, ctypes.c_int64), np.int64(number), np.int64(-number))
            if found != [number, -number]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("sizes", "args", "message"),
    [
        ((4,), (), "kernel k takes 1 arguments, and 0 were given"),
        ((8,), (1.5,), "argument 0: 1.5 has 4 bytes and the parameter 8"),
        ((4,), (7,), r"argument 0: 7 \(int\) has no known width; pass .*ctypes.c_int32\(n\)"),
        ((4,), (True,), r"True \(bool\) has no known width"),
        ((2,), (np.float16(1),), r"\(float16\) has no known width"),
        ((8,), (torch.zeros(1),), "argument 0: the tensor lies on cpu and the kernel on cuda:0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(sizes, args, message):
    with pytest.raises(ParameterError, match=message):
        Arguments("k", 0, sizes).place(args)


class Driver:
    """Stands for cuda.bindings.driver: notes each call and reads the arguments as the driver would."""

    class CUfunction_attribute:  # noqa: N801
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = "shared"

    class Result:
        def __init__(self, value):
            self.value, self.name = value, "CUDA_ERROR_INVALID_VALUE"

    def __init__(self, answer=0):
        self.calls, self.answer = [], answer

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuLaunchKernel":
                pointers = (ctypes.c_void_p * 2).from_address(arguments[9])
                read = [ctypes.c_float.from_address(pointers[0]).value, ctypes.c_int64.from_address(pointers[1]).value]
                self.calls.append((name, *arguments[:9], *read, arguments[10]))
                return (self.Result(self.answer),)
            self.calls.append((name, *arguments))
            return (self.Result(0),)

        return call


def kernel_on(driver, static_shared_bytes=0):
    return Kernel(
        Arguments("k", 0, (4, 8)), driver=driver, context="context", function="function", shared_limit=100_000,
        shared_allowed=48 * 1024 - static_shared_bytes,
        current_stream=lambda index: type("Stream", (), {"cuda_stream": 70 + index}),
    )  # fmt: skip


def test_a_launch_is_one_call_between_push_and_pop():
    driver = Driver()
    kernel_on(driver).launch(None, (3,), (128, 2), 0, 0.5, ctypes.c_int64(9))
    push, launch, pop = driver.calls
    assert (push, pop) == (("cuCtxPushCurrent", "context"), ("cuCtxPopCurrent",))
    assert launch == ("cuLaunchKernel", "function", 3, 1, 1, 128, 2, 1, 0, 70, 0.5, 9, 0)


def test_much_shared_memory_is_asked_for_once():
    driver = Driver()
    kernel = kernel_on(driver)
    for shared_bytes in (48 * 1024, 60_000, 50_000):
        kernel.launch(5, (1,), (1,), shared_bytes, 0.5, ctypes.c_int64(9))
    assert [c for c in driver.calls if c[0] == "cuFuncSetAttribute"] == [("cuFuncSetAttribute", "function", "shared", 60_000)]
    with pytest.raises(ParameterError, match="shared_bytes = 100001, but a block on cuda:0 has at most 100000"):
        kernel.launch(5, (1,), (1,), 100_001, 0.5, ctypes.c_int64(9))
    assert driver.calls[-1] == ("cuCtxPopCurrent",)


def test_static_shared_memory_counts_where_it_must_be_asked_for():
    driver = Driver()
    kernel = kernel_on(driver, static_shared_bytes=4)
    for shared_bytes in (48 * 1024 - 4, 48 * 1024):  # together 48 KB, then 4 bytes more
        kernel.launch(5, (1,), (1,), shared_bytes, 0.5, ctypes.c_int64(9))
    assert [c[0] for c in driver.calls].count("cuFuncSetAttribute") == 1
    assert ("cuFuncSetAttribute", "function", "shared", 48 * 1024) in driver.calls


def test_a_refused_launch_says_what_was_asked():
    with pytest.raises(
        KernelError, match=r"kernel k with grid \(0, 1, 1\), block \(32, 1, 1\): the driver says CUDA_ERROR_INVALID"
    ):
        kernel_on(Driver(answer=1)).launch(5, (0,), (32,), 0, 0.5, ctypes.c_int64(9))


def test_what_cannot_be_loaded_is_refused():
    compiled = Compiled("key", "sm_90", b"", "", {"axpy": Usage(8)})
    with pytest.raises(UnknownNameError, match="unknown kernel 'axpi': did you mean axpy"):
        load(compiled, "axpi", 0)
    with pytest.raises(ParameterError, match="device = 'cpu': a compiled kernel runs on CUDA devices only"):
        load(compiled, "axpy", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(MissingPartError, match="needs a CUDA device"):
            load(compiled, "axpy", 0)


@pytest.fixture
def axpy(tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path))
    major, minor = torch.cuda.get_device_capability()
    return compile_cubin(AXPY, arch=f"sm_{major}{minor}")


@pytest.mark.gpu
def test_a_kernel_runs_on_the_current_stream_with_much_shared_memory(axpy):
    kernel = load(axpy, "axpy", "cuda")
    assert kernel._arguments.sizes == (4, 8, 8, 8)
    assert load(axpy, "axpy", torch.cuda.current_device()) is kernel
    x, y = torch.randn(1000, device="cuda"), torch.randn(1024, device="cuda")
    expected = y.clone()
    expected[:1000] += 0.5 * x
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel.launch(None, (8,), (128,), 64 * 1024, 0.5, x, y, np.int64(1000))
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(y, expected)
    with pytest.raises(ParameterError, match=f"shared_bytes = {2**20}"):
        kernel.launch(stream, (8,), (128,), 2**20, 0.5, x, y, np.int64(1000))


@pytest.mark.gpu
def test_a_kernel_is_recorded_in_a_graph(axpy):
    kernel = load(axpy, "axpy", "cuda")
    x, y = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(None, (2,), (128,), 128 * 4, 1.0, x, y, np.int64(256))
    assert y.sum() == 0
    for _ in range(3):
        graph.replay()
    assert y.tolist() == [3.0] * 256


@pytest.mark.gpu
def test_a_thread_of_its_own_can_launch(axpy):
    kernel = load(axpy, "axpy", "cuda")
    x, y = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    torch.cuda.synchronize()
    thread = threading.Thread(target=kernel.launch, args=(0, (1,), (128,), 512, 2.0, x, y, np.int64(128)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 128


@pytest.mark.gpu
def test_code_of_another_architecture_is_refused(axpy):
    major, _ = torch.cuda.get_device_capability()
    other = compile_cubin(AXPY, arch="sm_80" if major != 8 else "sm_90")
    with pytest.raises(KernelError, match=f"compiled for {other.arch}, on cuda:0, which is sm_{major}.*the driver says CUDA_ERROR"):
        load(other, "axpy", 0)
