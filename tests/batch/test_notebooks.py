"""Notebooks: clean in git, faithful to their experiments, executed in quick mode, and refused when they cannot be right."""

import json
import math
from functools import partial

import nbformat
import numpy as np
import papermill
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

from wqlab import experiments, paths
from wqlab.batch.notebooks import execute, parameters
from wqlab.errors import NotebookError, OutputError, ParameterError, UnknownNameError
from wqlab.records import sha256_file

NOTEBOOKS = sorted(paths.shipped("notebooks").glob("*.ipynb"))
STEMS = [p.stem for p in NOTEBOOKS]


def read(stem):
    return nbformat.read(paths.shipped("notebooks") / f"{stem}.ipynb", as_version=4)


def edited(tmp_path, stem, change):
    """Return a copy of a notebook with its list of cells changed."""
    notebook = read(stem)
    change(notebook.cells)
    path = tmp_path / f"{stem}.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.fixture(scope="module")
def running_kernel():
    """A kernel that imports torch and transformers and loads each model once."""
    manager = AsyncKernelManager(kernel_name="python3")
    run_sync(manager.start_kernel)()
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


@pytest.fixture
def one_kernel(running_kernel, monkeypatch):
    """Let papermill run notebooks in that kernel, whose namespace is emptied first; tests without this start a kernel each."""
    NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")]), km=running_kernel).execute()
    monkeypatch.setattr(papermill, "execute_notebook", partial(papermill.execute_notebook, km=running_kernel))


def test_every_stem_has_a_notebook():
    assert experiments.stems() == STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_notebooks_are_thin_and_committed_without_outputs(stem):
    for cell in read(stem).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            assert not [line for line in cell.source.splitlines() if line.lstrip().startswith(("def ", "class "))]


@pytest.mark.parametrize("stem", STEMS)
def test_the_parameters_cell_declares_what_the_experiment_has(stem):
    (cell,) = [c for c in read(stem).cells if "parameters" in c.metadata.get("tags", [])]
    declared = {}
    exec(cell.source, declared)
    fields = experiments.get(stem).Parameters.model_fields
    assert {k: v for k, v in declared.items() if not k.startswith("__")} == {
        **{n: f.default for n, f in fields.items()},
        "out": None,
    }


@pytest.mark.parametrize("stem", STEMS)
def test_each_notebook_runs_in_quick_mode(stem, one_kernel, tmp_path):
    files = execute(stem, tmp_path, {"quick": True})
    sidecar = json.loads(files[".json"].read_text())
    assert sidecar["stem"] == stem
    assert sidecar["quick"] is True
    assert sidecar["evidence"]
    assert sidecar["git_commit"]
    assert {s: sha256_file(files[f".{s}"]) for s in ("svg", "png", "csv")} == sidecar["files"]
    outputs = [o for c in nbformat.read(files[".ipynb"], as_version=4).cells if c.cell_type == "code" for o in c.outputs]
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in outputs)
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*(stem + s for s in (".svg", ".png", ".csv", ".json")), "notebooks"]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alhpa": 2}, "declares no parameter 'alhpa'"),
        ({"alpha": math.nan}, "alpha = nan is refused"),
        ({"alpha": math.inf}, "alpha = inf is refused"),
        ({"alpha": 0}, "alpha = 0 is refused"),
        ({"alpha": -2}, "alpha = -2 is refused"),
        ({"alpha": None}, "alpha = None is refused"),
        ({"alpha": [2.0]}, "alpha = \\[2.0\\] is refused"),
        ({"alpha": np.array([2.0])}, "alpha = .* is refused"),
        ({"normalize": "softmax"}, "normalize = 'softmax' is refused"),
    ],
)
def test_bad_parameters_are_refused_by_name_before_anything_runs(given, message, tmp_path):
    with pytest.raises(ParameterError, match=message):
        execute("alpha_sweep", tmp_path, given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value", [np.float32(3.5), *(pytest.param(x, marks=pytest.mark.slow) for x in (np.int64(3), np.array(3.0), 3))]
)
def test_numpy_scalars_are_accepted_and_written_as_valid_json(value, one_kernel, tmp_path):
    files = execute("alpha_sweep", tmp_path, {"alpha": value, "similarity": "prose", "quick": True})
    assert json.loads(files[".json"].read_text())["parameters"]["alpha"] == float(value)


def test_a_notebook_without_a_tagged_cell_is_refused(tmp_path):
    path = edited(tmp_path, "alpha_sweep", lambda cells: [c.metadata.pop("tags", None) for c in cells])
    with pytest.raises(NotebookError, match="no cell tagged 'parameters'"):
        execute("alpha_sweep", tmp_path / "out", {"alpha": 1.0}, path)


def test_a_notebook_that_stops_early_fails_and_the_old_figure_stays(tmp_path):
    (tmp_path / "alpha_sweep.svg").write_text("the figure of yesterday")
    path = edited(tmp_path, "alpha_sweep", lambda cells: cells.insert(2, nbformat.v4.new_code_cell("import sys; sys.exit(0)")))
    with pytest.raises(NotebookError, match=r"ended without writing alpha_sweep.svg, .*alpha_sweep.json"):
        execute("alpha_sweep", tmp_path, {"quick": True}, path)
    assert (tmp_path / "alpha_sweep.svg").read_text() == "the figure of yesterday"


def test_a_failing_cell_is_named_and_the_notebook_is_kept(tmp_path):
    path = edited(tmp_path, "alpha_sweep", lambda cells: cells.insert(3, nbformat.v4.new_code_cell("raise KeyError('on purpose')")))
    with pytest.raises(NotebookError, match="KeyError: 'on purpose'"):
        execute("alpha_sweep", tmp_path, {}, path)
    assert (tmp_path / "notebooks" / "alpha_sweep.failed.ipynb").is_file()


def test_a_misspelt_parameter_given_to_papermill_itself_fails_in_the_notebook(tmp_path):
    source = paths.shipped("notebooks") / "alpha_sweep.ipynb"
    with pytest.raises(papermill.PapermillExecutionError, match="no parameter 'alhpa': did you mean alpha"):
        papermill.execute_notebook(source, tmp_path / "o.ipynb", {"alhpa": 3.0}, progress_bar=False)


def test_parameters_of_a_namespace():
    defaults = experiments.validate("alpha_sweep", {}).model_dump()
    namespace = {"In": ["", "alpha = 2.0"], **defaults, "alpha": 3.0, "normalize": "rank", "quick": True, "out": None}
    assert parameters("alpha_sweep", {**namespace, "x": 5})["alpha"] == 3.0  # a reader's own variables are no business of ours
    with pytest.raises(ParameterError, match="'alhpa'"):
        parameters("alpha_sweep", {**namespace, "In": ["# Parameters\nalhpa = 5\nout = 'x'\n"], "alhpa": 5})
    del namespace["normalize"]
    with pytest.raises(ParameterError, match="does not set 'normalize'"):
        parameters("alpha_sweep", namespace)


def test_what_is_no_notebook_and_who_is_no_stem(tmp_path):
    broken = tmp_path / "alpha_sweep.ipynb"
    broken.write_text("{ not a notebook")
    with pytest.raises(NotebookError, match="is not a notebook"):
        execute("alpha_sweep", tmp_path, {}, broken)
    with pytest.raises(UnknownNameError, match="alpha_sweep"):
        execute("alpha_swep", tmp_path, {}, broken)


def test_a_relative_folder_means_the_readers_not_the_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute("kv_memory", "here", {"quick": True})
    assert (tmp_path / "here" / "kv_memory.json").is_file()


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        execute("alpha_sweep", tmp_path / "out", {})


def test_a_kernel_that_dies_is_an_error_of_its_notebook(tmp_path):
    die = nbformat.v4.new_code_cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    path = edited(tmp_path, "alpha_sweep", lambda cells: cells.insert(2, die))
    with pytest.raises(NotebookError, match="its kernel died"):
        execute("alpha_sweep", tmp_path / "out", {}, path)
