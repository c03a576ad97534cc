"""CUDA C++ to machine code with NVRTC, which needs no GPU and about a second; then from the disk cache."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from wqlab import paths
from wqlab.codegen import disk, usage
from wqlab.codegen.usage import Usage
from wqlab.errors import CompileError, MissingPartError, ParameterError

#: The name of every source in the compiler's log.
_FILE = "kernel.cu"
_INSTALL = "install it: pip install 'wqlab[gpu]'"
#: Options that this module sets itself.
_OURS = {"name": "it is fixed", "arch": "it has a parameter of its own", "include_path": "render() writes headers into the source"}
_ERROR = re.compile(rf"^{re.escape(_FILE)}\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$")
_SHOWN = 3


@dataclass(frozen=True)
class Compiled:
    """Machine code of one source for one architecture.

    Parameters
    ----------
    key : str
        sha256 of all that decides the code; also its name in the disk cache.
    arch : str
        For example ``"sm_90"``.
    cubin : bytes
        What `wqlab.codegen.load` hands to the driver.
    log : str
        Of the compiler: its warnings, and the report of ``ptxas -v``.
    usage : mapping of str to Usage
        Per kernel. A kernel without ``extern "C"`` has its mangled name.
    """

    key: str
    arch: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    usage: Mapping[str, Usage] = field(compare=False)


def compile_cubin(source: str, *, arch: str, options: Mapping[str, object] | Iterable[tuple[str, object]] = ()) -> Compiled:
    """Compile CUDA C++ for one architecture, or take it from the disk cache.

    Parameters
    ----------
    source : str
        As `render` gives it. Kernels are declared ``extern "C" __global__``, so that their names stay as written.
    arch : str
        The GPU's architecture: ``"sm_80"``, ``"sm_90"``, ``"sm_90a"``.
    options : mapping or pairs, optional
        Fields of ``cuda.core.ProgramOptions``, for example ``{"use_fast_math": True, "max_register_count": 64}``. The language is
        C++17 unless ``std`` says otherwise, and ``ptxas_options`` are added to ``-v``.

    Returns
    -------
    Compiled
        The same source, options, architecture and NVRTC version are compiled once per machine.

    Raises
    ------
    CompileError
        With the first errors and the lines they point to.
    ParameterError
        For an architecture or option that the compiler does not have.
    MissingPartError
        When a package of the extra ``gpu`` is missing.
    OutputError
        When the cache folder cannot be written.
    """
    given = dict(options)
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ParameterError(f"arch = {arch!r} is not an architecture such as 'sm_80' or 'sm_90a'")
    version = _nvrtc_version()
    try:
        decides = json.dumps([source, arch, given, version], sort_keys=True)
    except TypeError as error:
        raise ParameterError(f"options = {given!r}: {error}; values are numbers, texts, and lists of them") from error
    key = hashlib.sha256(decides.encode()).hexdigest()
    entry = disk.fetch(key, lambda: _compile(source, arch, given, version, key))
    return Compiled(key, arch, entry.cubin, entry.log, usage.parse(entry.log))


def _compile(source: str, arch: str, given: dict[str, object], version: tuple[int, int], key: str) -> disk.Entry:
    try:
        from cuda import core
    except ImportError as error:
        raise MissingPartError(f"compiling CUDA C++ needs the package cuda-core ({error}); {_INSTALL}") from error
    _check(arch, given, {f.name for f in dataclasses.fields(core.ProgramOptions)})
    settings: dict[str, Any] = {"std": "c++17", "no_cache": True, "ptxas_options": [], **given}
    more = settings["ptxas_options"]
    settings["ptxas_options"] = ["-v", *([more] if isinstance(more, str) else more)]
    if re.search(r"^\s*#\s*include\s*[<\"]", source, re.MULTILINE):
        settings["include_path"] = [str(_headers(version))]
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", core.ProgramOptions(name=_FILE, arch=arch, **settings))
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # its class is in a private module of cuda.core; the text holds the compiler's log
        said = str(error)
        if "NVRTC_ERROR_COMPILATION" not in said and "NVRTC_ERROR_INVALID_OPTION" not in said:
            raise
        raise _compile_error(said.partition("compilation log:")[2] or said, source, arch, version, key) from error
    text = log.getvalue().rstrip("\0 \n") + "\n"  # NVRTC counts the C string's end
    if not usage.parse(text):
        raise CompileError(f'the source for {arch} holds no kernel: declare one as extern "C" __global__ void name(...)')
    return disk.Entry(code, text)


def _check(arch: str, given: dict[str, object], known: set[str]) -> None:
    error, numbers = _nvrtc().nvrtcGetSupportedArchs()
    if not error.value and int(re.sub(r"\D", "", arch)) not in numbers:
        served = ", ".join(f"sm_{number}" for number in numbers)
        raise ParameterError(f"arch = {arch!r} is not one that this NVRTC compiles for: {served}")
    for name in given:
        if name in _OURS:
            raise ParameterError(f"option {name!r} cannot be set: {_OURS[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else "see cuda.core.ProgramOptions"
            raise ParameterError(f"option {name!r} is none of cuda.core's: {hint}")


def _compile_error(log: str, source: str, arch: str, version: tuple[int, int], key: str) -> CompileError:
    """Return the error for a refused source: its first messages, with the lines they point to, and where the whole lies."""
    lines, found = source.splitlines(), []
    for line in log.replace("\0", "").splitlines():
        if match := _ERROR.match(line):
            number = int(match[1])
            text = lines[number - 1].strip() if number <= len(lines) else ""
            found.append(f"  line {number}: {match[2]}\n    {text}")
        elif re.match(r"(ptxas|nvrtc)\b.*\b(error|fatal)\b", line):  # these point to no line of the source
            found.append(f"  {line}")
    kept = disk.folder() / "refused" / f"{key}.cu"
    paths.write_text(kept, source)
    return CompileError(
        f"NVRTC {'.'.join(map(str, version))} cannot compile this source for {arch}; errors: {len(found)}\n"
        + "\n".join(found[:_SHOWN] or [log.strip()])
        + f"\nThe whole source is {kept}: correct the template in kernels/, or the parameters that it was rendered with"
    )


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingPartError(f"compiling CUDA C++ needs the package cuda-bindings ({error}); {_INSTALL}") from error
    return nvrtc


def _nvrtc_version() -> tuple[int, int]:
    try:
        error, major, minor = _nvrtc().nvrtcVersion()
    except RuntimeError as missing:  # the bindings are here, the library is not
        raise MissingPartError(
            f"compiling CUDA C++ needs the compiler of the package nvidia-cuda-nvrtc ({missing}); {_INSTALL}"
        ) from missing
    if error.value:
        raise MissingPartError(f"NVRTC does not tell its version ({error.name}); install nvidia-cuda-nvrtc again")
    return major, minor


@lru_cache(maxsize=1)
def _headers(version: tuple[int, int]) -> Path:
    """Return a folder with all of CUDA's headers, of NVRTC's major version: of the packages, else of a toolkit."""
    major = version[0]
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) / f"cu{major}" / "include" for place in (spec.submodule_search_locations or [] if spec else [])]
    nvcc = shutil.which("nvcc")
    toolkits = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        nvcc and Path(nvcc).resolve().parents[1],
        "/usr/local/cuda",
    ]
    folders += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    for folder in folders:
        # mma.h lies in one package and crt/mma.h, which it includes, in another.
        if (folder / "cuda_fp16.h").is_file() and (folder / "crt" / "mma.h").is_file() and _major(folder) == major:
            return folder
    raise MissingPartError(
        f"the source includes headers, and none of these folders holds those of CUDA {major}: {', '.join(map(str, folders))}; "
        "install nvidia-cuda-runtime and nvidia-cuda-crt: pip install 'wqlab[gpu]', or set CUDA_HOME to a toolkit of that version"
    )


def _major(folder: Path) -> int | None:
    api = folder / "cuda_runtime_api.h"
    match = (
        re.search(r"#define\s+CUDART_VERSION\s+(\d+)", api.read_text(encoding="utf-8", errors="replace")) if api.is_file() else None
    )
    return int(match[1]) // 1000 if match else None
