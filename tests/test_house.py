"""The house: linters, layers, types and dependencies hold; the top level, the names and the entry points are what they promise."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from wqlab import paths

ROOT = paths.checkout()
pytestmark = pytest.mark.skipif(ROOT is None, reason="runs in a checkout")

TOP_LEVEL = {
    ".ci", ".gitignore", "CITATION.cff", "LICENSE", "Makefile", "README.md", "constraints.txt", "data", "docs", "environment.yml",
    "figures", "kernels", "notebooks", "pyproject.toml", "tests", "wqlab",
}  # fmt: skip


def run(*command):
    """Run a tool of this environment in the checkout; its whole output is the failure message."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked():
    """Return the paths that git tracks and that are here, relative to the checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = run("git", "ls-files", "-z").split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def project():
    """Return the ``[project]`` table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(texts):
    return {canonicalize_name(r.name): r for r in map(Requirement, texts)}


@pytest.fixture(scope="module")
def pins():
    """Return package -> version from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    parsed = requirements(line for line in lines if line and not line.startswith("#"))
    versions = {}
    for name, requirement in parsed.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        versions[name] = Version(specifier.version)
    return versions


@pytest.mark.parametrize("command", ["ruff check --output-format concise .", "ruff format --check .", "mypy", "deptry ."])
def test_linters_find_nothing(command):
    run(sys.executable, "-m", *command.split())


def test_imports_point_down_the_floors():
    run(Path(sys.executable).with_name("lint-imports"))


def test_the_top_level_is_the_designs_list(tracked):
    assert {path.parts[0] for path in tracked} == TOP_LEVEL


def test_no_tracked_file_is_large(tracked):
    # Only what this project trained may be larger: weights that a reader cannot get elsewhere.
    limits = {path: 16e6 if path.parts[:2] == ("data", "models") else 4e6 for path in tracked}
    assert [str(path) for path, limit in limits.items() if (ROOT / path).stat().st_size > limit] == []


def test_names_say_what_a_file_is_for(tracked):
    vague = re.compile(r"^(utils?|helpers?|misc|common)\.|_v\d+(\.|$)|_(old|new|copy|final)\.", re.IGNORECASE)
    assert [str(p) for p in tracked if any(vague.search(part) for part in p.parts)] == []


def test_no_tracked_file_names_a_place_on_somebodys_machine(tracked):
    places = [re.escape(str(place)) for place in (ROOT, ROOT.parent / "shared", Path.home()) if len(place.parts) > 2]
    # The group follows the slash, so that this line does not match itself.
    pattern = re.compile(rf"(?<![\w.-])({'|'.join([*places, '/(root/|Users/[a-z]|home/[a-z])'])})")
    found = []
    for path in tracked:
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path}:{text[: m.start()].count(chr(10)) + 1}: {m[0]}" for m in pattern.finditer(text)]
    assert found == []


def test_every_room_has_tests():
    rooms = [p.parent for p in sorted((ROOT / "wqlab").glob("*/__init__.py"))]
    assert rooms
    without = [
        r.name for r in rooms if not [*(ROOT / "tests" / r.name).rglob("test_*.py"), *(ROOT / "tests").glob(f"test_{r.name}.py")]
    ]
    assert without == []


def test_kernels_know_neither_python_nor_torch():
    files = [p for p in (ROOT / "kernels").rglob("*") if p.is_file()]
    assert [p.name for p in files if p.suffix == ".py"] == []
    torch = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10)/")
    assert [p.name for p in files if torch.search(p.read_text(encoding="utf-8"))] == []


def test_constraints_pin_every_direct_dependency_inside_its_range(project, pins):
    direct = requirements(
        [*project["dependencies"], *(d for n, extra in project["optional-dependencies"].items() if n != "all" for d in extra)]
    )
    # The pip that installs is the one that is there: replacing it while it runs helps nobody.
    assert sorted(direct.keys() - pins.keys()) == ["pip"]
    assert {n: str(pins[n]) for n, r in direct.items() if n in pins and not r.specifier.contains(pins[n])} == {}


def test_all_means_every_other_extra(project):
    extras = project["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == project["name"]
    assert everything.extras == extras.keys() - {"all"}


def test_conda_installs_what_pyproject_describes(project):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == project["name"]
    *conda, pip = environment["dependencies"]
    python, installer = (Requirement(re.sub(r"(?<![=<>~!])=(?!=)", "==", text)) for text in conda)
    assert python.name == "python"
    (version,) = (s.version for s in python.specifier)
    assert Requirement(f"python{project['requires-python']}").specifier.contains(version)
    assert installer == requirements(project["dependencies"])["pip"]
    constraint, editable = pip["pip"]
    assert constraint.startswith("-c ")
    assert (ROOT / constraint.removeprefix("-c ")).is_file()
    wanted = Requirement(editable.replace("-e .", project["name"]))
    assert wanted.extras <= project["optional-dependencies"].keys()
    assert wanted.extras == {"all"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("reproduce", "wqlab reproduce --jobs 1"),
        ("reproduce QUICK=1 JOBS=2", "wqlab reproduce --jobs 2 --quick"),
        ("test", "-m pytest"),
    ],
)
def test_make_builds_the_environment_then_does_its_work(line, expected, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("no make")
    plan = run("make", "--no-print-directory", "-n", *line.split(), f"VENV={tmp_path / 'venv'}")
    # The stamp comes last: an environment that is half made does not count as made.
    assert plan.index("-m venv") < plan.index("-m pip install") < plan.index(f"touch {tmp_path / 'venv'}/.wqlab-base")
    assert expected in plan.splitlines()[-1]


def test_make_refuses_an_old_python_in_one_line(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("no make")
    old = tmp_path / "python-old"
    # Stands for Python 3.9: the real interpreter, with another version to show.
    pretend = "import sys; sys.version_info, sys.version = (3, 9), '3.9.1 x'; exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pretend}" "$2"\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "test", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"wqlab needs Python 3.11 or newer; {old} is 3.9.1. Name another one: make test PYTHON=python3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_two_test_files_share_a_name():
    """pytest imports them by their names alone, so a second one would stop the whole collection."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
