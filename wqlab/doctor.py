"""What is here and what is missing on this machine, with the way to get it."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

from packaging.requirements import Requirement

from wqlab import paths
from wqlab.errors import OutputError
from wqlab.models import listing
from wqlab.profile import environment

#: ``ok``; ``absent``: optional and not here; ``problem``: something that the base install needs.
Status = Literal["ok", "absent", "problem"]

#: Free space that the models, their fp16 copy and the downloads need.
_DISK_GB = 1.0


@dataclass(frozen=True)
class Check:
    """One line of the doctor: what was looked at, its state, and what to do when it is not ``ok``."""

    check: str
    status: Status
    detail: str
    fix: str = ""


def examine() -> list[Check]:
    """Look at Python, packages, GPU, tools, cache and models; never raises for something that is missing."""
    import torch  # so that hardware() can see the GPUs

    found = environment.hardware()
    checks = [
        Check("python", "ok", f"{environment.versions()['python']} at {sys.prefix}"),
        Check("wqlab", "ok", f"{environment.versions().get('wqlab', 'unknown')}, {environment.git_commit()}"),
        *_packages(),
        Check("hardware", "ok", f"{found['cores']} cores of {found['cpu']}, {found['memory_gb']} GB"),
    ]
    if found["gpus"]:
        checks.append(Check("gpu", "ok", f"{', '.join(found['gpus'])}; CUDA {torch.version.cuda}"))
    else:
        checks.append(
            Check(
                "gpu",
                "absent",
                "no CUDA device: timing figures use recorded tables",
                "install the driver and a CUDA build of torch",
            )
        )
    checks += [_nvml(), _tool("nvcc", "compiles CUDA", "CUDA toolkit"), _tool("ncu", "reads counters", "Nsight Compute")]
    checks += [_kernel(), _cache()]
    checks += [
        Check(
            f"model {m['name']}",
            "ok" if m["fetched"] else "absent",
            m["description"],
            "" if m["fetched"] else m["get"],
        )
        for m in listing.status()
    ]
    return checks


def to_dicts(checks: list[Check]) -> list[dict[str, Any]]:
    """Return the checks as plain dicts, for JSON."""
    return [asdict(check) for check in checks]


def _packages() -> list[Check]:
    """Compare the installed packages with the ranges that wqlab itself declares."""
    wrong = []
    needed = [Requirement(text) for text in importlib.metadata.requires("wqlab") or []]
    base = [r for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
    for requirement in base:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    versions = environment.versions()
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "numpy") if name in versions)
    if wrong:
        return [Check("packages", "problem", "; ".join(wrong), "pip install -c constraints.txt -e .")]
    return [Check("packages", "ok", f"all {len(base)} are in range; {shown}")]


def _tool(name: str, purpose: str, package: str) -> Check:
    path = shutil.which(name)
    return Check(name, "ok", path) if path else Check(name, "absent", f"not on the PATH ({purpose})", f"install the {package}")


def _nvml() -> Check:
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except ImportError:
        return Check("nvml", "absent", "nvidia-ml-py is not installed: no power readings", "pip install 'wqlab[gpu]'")
    except pynvml.NVMLError as error:
        return Check("nvml", "absent", f"{error}: no power readings", "needs an NVIDIA driver")
    return Check("nvml", "ok", f"{count} devices")


def _kernel() -> Check:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return Check("jupyter kernel", "problem", "no kernel named python3", "pip install ipykernel")
    python = spec.argv[0]
    if python in ("python", "python3") or python == sys.executable:
        return Check("jupyter kernel", "ok", f"python3 runs {sys.executable}")
    same = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if same == sys.prefix:
        return Check("jupyter kernel", "ok", f"python3 runs {python}")
    fix = f"{sys.executable} -m ipykernel install --sys-prefix"
    return Check("jupyter kernel", "problem", f"python3 is {python}, not this environment's {sys.executable}", fix)


def _cache() -> Check:
    folder = paths.cache_dir()
    try:
        paths.output_dir(folder)
    except OutputError as error:
        return Check("cache", "problem", str(error), "name another folder with WQLAB_CACHE")
    free = shutil.disk_usage(folder).free / 1e9
    if free < _DISK_GB:
        return Check("cache", "problem", f"{folder}: {free:.1f} GB free, {_DISK_GB} needed", "free some space or set WQLAB_CACHE")
    return Check("cache", "ok", f"{folder}: {free:.0f} GB free")
