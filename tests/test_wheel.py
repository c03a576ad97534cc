"""The wheel: built from this checkout, installed elsewhere, and used from an empty folder as a stranger would."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from wqlab import claims, experiments, paths

ROOT = paths.checkout()
pytestmark = pytest.mark.skipif(ROOT is None, reason="builds from a checkout")


LEFT_BEHIND = [
    "figures/quick/left.json",
    "figures/notebooks/left.ipynb",
    "figures/.staging-left-1/left.svg",
    "data/.cache/left",
    "wqlab/__pycache__/left.pyc",
    "notebooks/.ipynb_checkpoints/left.ipynb",
    "tests/left.py",
]


def succeed(*command, **options):
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **options
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of this checkout that also holds what runs leave behind."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    for name in ("wqlab", "data", "kernels", "notebooks", "figures"):
        shutil.copytree(ROOT / name, tree / name)
    for name in LEFT_BEHIND:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    succeed(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("borrowed", id="dependencies-of-this-environment"),
        pytest.param("index", id="dependencies-from-the-index", marks=pytest.mark.slow),
    ],
)
def installed(request, wheel, tmp_path_factory):
    """Install the wheel into a new environment and return a function that runs one of its programs in an empty folder."""
    place = tmp_path_factory.mktemp("installed")
    venv, home = place / "venv", place / "home"
    home.mkdir()
    succeed(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    if request.param == "borrowed":
        succeed(*pip, "--no-index", "--no-deps", wheel)
        site = Path(succeed(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # The folder that a .pth file names is searched, but its own .pth files are not read: the editable wqlab stays out of reach.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    else:
        succeed(*pip, "-c", ROOT / "constraints.txt", wheel)

    # No setting of the user, and no kernel of another environment, can take part.
    foreign = ("PYTHON", "WQLAB", "JUPYTER", "IPYTHON", "MPL", "VIRTUAL_ENV", "XDG_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment |= {"HOME": str(home), "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def use(folder, program, *arguments):
        return succeed(venv / "bin" / program, *arguments, cwd=folder, env=environment)

    use.venv = venv
    return use


def test_data_templates_notebooks_and_figures_travel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"wqlab/py.typed", "wqlab/figures/style.mplstyle"}
    for folder in ("data", "kernels", "notebooks", "figures"):
        tracked = succeed("git", "ls-files", "-z", folder, cwd=ROOT).split("\0")
        expected |= {f"wqlab/_shipped/{name}" for name in tracked if name and (ROOT / name).is_file()}
    assert expected - names == set()
    assert {f"wqlab/_shipped/notebooks/{stem}.ipynb" for stem in experiments.stems()} <= names


def test_nothing_else_travels(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if not name.endswith("/")} == {"wqlab", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert [name for name in names if "left" in Path(name).name] == []


def test_import_is_of_the_wheel(installed, tmp_path):
    place = installed(tmp_path, "python", "-c", "import wqlab; print(wqlab.__file__)").strip()
    assert Path(place).is_relative_to(installed.venv)


def test_list(installed, tmp_path):
    rows = json.loads(installed(tmp_path, "wqlab", "list", "--json"))
    assert [row["stem"] for row in rows] == experiments.stems()
    assert all(row["notebook"] for row in rows)


def test_figures_with_and_without_parameters(installed, tmp_path):
    installed(tmp_path, "wqlab", "figure", "kv_memory", "--out", "here")
    assert {p.name for p in (tmp_path / "here").iterdir()} == {f"kv_memory.{s}" for s in ("svg", "png", "csv", "json")}
    installed(tmp_path, "wqlab", "figure", "alpha_sweep", "-p", "alpha=3", "-p", "similarity=prose")
    sidecar = json.loads((tmp_path / "figures" / "alpha_sweep.json").read_text(encoding="utf-8"))
    assert sidecar["parameters"]["alpha"] == 3


def test_claims_are_judged_as_in_the_checkout(installed, tmp_path):
    rows = json.loads(installed(tmp_path, "wqlab", "claims", "--json"))
    assert {row["id"]: row["verdict"] for row in rows} == {row["id"]: row["verdict"] for row in claims.judge_all()}


def test_a_record_is_shown(installed, tmp_path):
    record = json.loads(installed(tmp_path, "wqlab", "bench", "show", "layer_importance", "--gpu", "cpu", "--json"))
    assert record["rows"]
    assert record["provenance"]["hardware"]


def test_a_shipped_notebook_runs_with_the_wheel(installed, tmp_path):
    assert "1 made, 0 kept, 0 failed" in installed(tmp_path, "wqlab", "reproduce", "kv_memory", "--quick")
    sidecar = json.loads((tmp_path / "figures" / "quick" / "kv_memory.json").read_text(encoding="utf-8"))
    # The kernel wrote it; one that imported a checkout would name a commit.
    assert sidecar["git_commit"] == f"wheel {sidecar['versions']['wqlab']}"
