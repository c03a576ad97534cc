"""CUDA C++ is compiled here, without a GPU; what is compiled once is read from disk."""

import logging
import subprocess
import sys
import threading

import pytest

from wqlab.codegen import Usage, compile_cubin, disk
from wqlab.codegen import compile as compiling
from wqlab.codegen.usage import parse
from wqlab.errors import CompileError, DamagedFileError, MissingPartError, OutputError, ParameterError

pytest.importorskip("cuda.core", reason="the CUDA compiler's packages exist for Linux")

AXPY = """
#include <cuda_fp16.h>
#include <mma.h>

extern "C" __global__ void axpy(float a, const __half* x, float* y, int n) {
    __shared__ float tile[128];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? __half2float(x[i]) : 0.0f;
    __syncthreads();
    if (i < n) y[i] += a * tile[127 - threadIdx.x];
}
"""
#: 64 live values, each needed twice in another order.
MANY = """
extern "C" __global__ void many(float* x) {
    float held[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) held[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) x[i * 32 + threadIdx.x] = held[i] * held[(i * 7 + 3) % 64];
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compilations(monkeypatch):
    """Count what reaches NVRTC."""
    calls = []
    real = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda *arguments: calls.append(arguments) or real(*arguments))
    return calls


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_every_architecture_of_the_house(arch):
    compiled = compile_cubin(AXPY, arch=arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.arch == arch
    usage = compiled.usage["axpy"]
    assert 8 <= usage.registers <= 32
    assert usage.shared_bytes == 512
    assert not usage.spills


def test_a_kernel_that_spills_is_seen_to_spill():
    free = compile_cubin(MANY, arch="sm_80").usage["many"]
    held = compile_cubin(MANY, arch="sm_80", options={"max_register_count": 32}).usage["many"]
    assert free.registers > 64
    assert not free.spills
    assert held.registers <= 32
    assert held.spills
    assert min(held.spill_store_bytes, held.spill_load_bytes, held.stack_bytes) > 0


def test_a_log_with_functions_that_were_not_inlined_is_read():
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90'\nptxas info    : Function properties for a\n"
        "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 24 registers, used 1 barriers, 48 bytes cumulative stack size, 128 bytes smem, 380 bytes cmem[0]\n"
        "ptxas info    : Function properties for device\n"
        "ptxas         .     32 bytes stack frame, 100 bytes spill stores, 200 bytes spill loads\n\x00\x00"
    )
    assert parse(log) == {"a": Usage(24, 128, 104, 208, 48)}
    assert parse("nothing") == {}


def test_the_second_time_it_comes_from_disk(compilations):
    first = compile_cubin(MANY, arch="sm_90", options={"use_fast_math": True})
    again = compile_cubin(MANY, arch="sm_90", options=[("use_fast_math", True)])
    assert again == first
    assert again.usage == first.usage
    assert len(compilations) == 1


def test_all_that_decides_the_code_is_in_the_key(compilations, monkeypatch):
    keys = {
        compile_cubin(MANY, arch="sm_80").key,
        compile_cubin(MANY + "\n", arch="sm_80").key,
        compile_cubin(MANY, arch="sm_90").key,
    }
    keys.add(compile_cubin(MANY, arch="sm_80", options={"std": "c++20"}).key)
    monkeypatch.setattr(compiling, "_nvrtc_version", lambda: (99, 1))
    keys.add(compile_cubin(MANY, arch="sm_80").key)
    assert len(keys) == len(compilations) == 5


def test_a_damaged_entry_is_kept_named_and_built_again(cache, caplog, compilations):
    first = compile_cubin(MANY, arch="sm_90")
    (path,) = cache.glob("*.kernel")
    whole = path.read_bytes()
    for damage, kept in ((whole[:-9], f"{path.name}.damaged"), (b"", f"{path.name}.damaged.2")):
        path.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            assert compile_cubin(MANY, arch="sm_90").cubin == first.cubin
        assert f"kept as {kept}," in caplog.records[-1].getMessage()
        assert (cache / kept).read_bytes() == damage
        assert disk._read(path).cubin == first.cubin
    assert len(compilations) == 3


def test_an_error_shows_the_lines_it_is_about(cache):
    wrong = 'extern "C" __global__ void k(float* x) {\n    x[0] = threadIdxx.x;\n    float y = "text";\n}\n'
    with pytest.raises(CompileError) as caught:
        compile_cubin(wrong, arch="sm_90")
    message = str(caught.value)
    assert 'line 2: identifier "threadIdxx" is undefined\n    x[0] = threadIdxx.x;' in message
    assert 'float y = "text";' in message
    assert "for sm_90; errors: 2" in message
    assert "\0" not in message
    (kept,) = (cache / "refused").glob("*.cu")
    assert kept.read_text() == wrong
    assert f"The whole source is {kept}: correct the template" in message
    assert not list(cache.glob("*.kernel"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('extern "C" __global__ void k() { asm("bogus;"); }', "Not a name of any known instruction: 'bogus'"),
        ("#include <no_such_header.h>\n", r"line 1: (could not|cannot) open source file .*\n\s+#include <no_such_header.h>"),
        ("__device__ int f() { return 1; }", "holds no kernel"),
    ],
)
def test_other_errors_are_shown_too(source, message):
    with pytest.raises(CompileError, match=message):
        compile_cubin(source, arch="sm_80")


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("90", {}, "arch = '90' is not an architecture such as"),
        ("sm_12", {}, "arch = 'sm_12' is not one that this NVRTC compiles for: .*sm_80"),
        ("sm_80", {"fast_math": True}, "'fast_math' is none of cuda.core's: did you mean use_fast_math"),
        ("sm_80", {"name": "x"}, "'name' cannot be set"),
        ("sm_80", {"std": object()}, "not JSON serializable; values are numbers"),
    ],
)
def test_a_wrong_architecture_or_option_is_refused(arch, options, message):
    with pytest.raises(ParameterError, match=message):
        compile_cubin(MANY, arch=arch, options=options)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.delattr("cuda.bindings.nvrtc")
    with pytest.raises(MissingPartError, match=r"cuda-bindings .*pip install 'wqlab\[gpu\]'"):
        compile_cubin(MANY, arch="sm_80")


def test_missing_headers_are_named(monkeypatch, tmp_path):
    compiling._headers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
        patch.setattr(compiling.shutil, "which", lambda name: None)
        patch.setenv("CUDA_HOME", str(tmp_path))
        patch.setattr(compiling, "_major", lambda folder: None)
        with pytest.raises(MissingPartError, match="nvidia-cuda-runtime and nvidia-cuda-crt"):
            compile_cubin(AXPY, arch="sm_80")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"cannot write the cache folder .*WQLAB_CACHE"):
        compile_cubin(MANY, arch="sm_80")


def test_threads_that_want_the_same_kernel_compile_it_once(compilations):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compile_cubin(MANY, arch="sm_80"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == len(compilations) == 1


def test_processes_that_want_the_same_kernel_leave_one_whole_file(cache):
    program = "import sys; from wqlab.codegen import compile_cubin; print(compile_cubin(sys.argv[1], arch='sm_80').key)"
    both = [subprocess.Popen([sys.executable, "-c", program, MANY], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    keys = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (path,) = cache.glob("*.kernel")
    assert keys == {path.stem}
    assert [p.name for p in cache.iterdir() if ".tmp" in p.name or "damaged" in p.name] == []
    assert disk._read(path).cubin.startswith(b"\x7fELF")


def test_a_file_of_another_kind_is_damaged(tmp_path):
    (tmp_path / "x.kernel").write_bytes(b"\x7fELF")
    with pytest.raises(DamagedFileError, match="does not match its sha256"):
        disk._read(tmp_path / "x.kernel")
