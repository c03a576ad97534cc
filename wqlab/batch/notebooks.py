"""Execute one notebook: its parameters are checked before it starts, its output is required when it ends."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from wqlab import experiments, paths
from wqlab.batch.save import SUFFIXES
from wqlab.errors import NotebookError, OutputError, ParameterError


def parameters(stem: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of `stem` from a notebook's variables, validated.

    papermill only warns about a parameter that the notebook does not declare. This refuses it: the names that papermill injected
    are read from the executed cells.

    Parameters
    ----------
    stem : str
        The notebook's stem.
    namespace : mapping
        The notebook's ``globals()``.

    Raises
    ------
    ParameterError
        For an injected name that the experiment does not have, a declared one that is missing, or a refused value.
    """
    fields = experiments.get(stem).Parameters.model_fields
    injected = {name for cell in namespace.get("In", ()) if cell.startswith("# Parameters\n") for name in _assigned(cell)}
    given = {name: namespace[name] for name in injected - {"out"} if name in namespace}
    for name in fields:
        if name not in namespace:
            raise ParameterError(f"{stem}: the notebook's parameters cell does not set {name!r}; run that cell first")
        given[name] = namespace[name]
    return experiments.validate(stem, given).model_dump()


def _assigned(cell: str) -> set[str]:
    targets = [t for node in ast.parse(cell).body if isinstance(node, ast.Assign) for t in node.targets]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def notebook_path(stem: str) -> Path:
    """Return the notebook of `stem` that travels with the package.

    Raises
    ------
    NotebookError
        When the stem has an experiment but no notebook.
    """
    path = paths.shipped("notebooks") / f"{stem}.ipynb"
    if not path.is_file():
        raise NotebookError(f"stem {stem!r} has no notebook at notebooks/{stem}.ipynb; draw it with: wqlab figure {stem}")
    return path


def execute(stem: str, out: Path | str, given: Mapping[str, Any], notebook: Path | None = None) -> dict[str, Path]:
    """Run the notebook of `stem` with papermill and move the figure it made into `out`.

    The notebook writes into a staging folder. Only when it ended and its whole output is there do the files replace older ones, so
    a run that fails or is killed loses nothing.

    Parameters
    ----------
    stem : str
        Which notebook.
    out : path
        The folder for ``<stem>.svg|png|csv|json``; the executed notebook goes to ``out/notebooks/<stem>.ipynb``.
    given : mapping
        Parameters that differ from the notebook's own.
    notebook : Path, optional
        Another notebook file than the one that travels with the package.

    Returns
    -------
    dict of str to Path
        Suffix -> file, and ``".ipynb"`` -> the executed notebook.

    Raises
    ------
    UnknownNameError, ParameterError
        For a stem, a parameter name or a value that cannot be; nothing was run.
    NotebookError
        When a cell failed, or the notebook ended without its figure. The notebook as far as it ran is kept and named.
    OutputError
        When `out` cannot be written.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    experiments.get(stem)  # an unknown stem is the first thing to say
    source = notebook or notebook_path(stem)
    _check_declared(source, given)
    # The values papermill gets are plain: it writes them into the notebook as Python source.
    plain = {name: value for name, value in experiments.validate(stem, given).model_dump(mode="json").items() if name in given}
    folder = paths.output_dir(out).resolve()
    done = folder / "notebooks" / f"{stem}.ipynb"
    _clear_stale(folder, stem)
    # No `cwd` for papermill: it would move this whole process there, under the feet of notebooks that run beside this one.
    staging = paths.output_dir(folder / f".staging-{stem}-{os.getpid()}")
    running = staging / f"{stem}.ipynb"
    try:
        try:
            papermill.execute_notebook(
                str(source),
                str(running),
                {**plain, "out": str(staging)},
                kernel_name="python3",
                progress_bar=False,
                extra_arguments=["--log-level=CRITICAL"],  # what it says of starting and stopping is not about the notebook
            )
        except DeadKernelError as error:
            kept = _keep(running, done.with_suffix(".failed.ipynb"))
            raise NotebookError(
                f"notebook {stem}: its kernel died, often for lack of memory; try --quick or fewer --jobs (it ran so far: {kept})"
            ) from error
        except PapermillExecutionError as error:
            kept = _keep(running, done.with_suffix(".failed.ipynb"))
            raise NotebookError(f"notebook {stem} failed: {error.ename}: {error.evalue} (as far as it ran: {kept})") from error
        missing = [suffix for suffix in SUFFIXES if not (staging / f"{stem}{suffix}").is_file()]
        if missing:
            kept = _keep(running, done.with_suffix(".failed.ipynb"))
            lost = ", ".join(stem + suffix for suffix in missing)
            raise NotebookError(f"notebook {stem} ended without writing {lost}: it stopped early or does not save (see {kept})")
        files = {suffix: _keep(staging / f"{stem}{suffix}", folder / f"{stem}{suffix}") for suffix in SUFFIXES}
        return {**files, ".ipynb": _keep(running, done)}
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"cannot write to {folder}: {error.strerror or error}; free some space or name another folder") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _clear_stale(folder: Path, stem: str) -> None:
    """Remove what killed runs left behind: staging folders whose process is gone."""
    for left in folder.glob(f".staging-{stem}-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _check_declared(source: Path, given: Mapping[str, Any]) -> None:
    """Refuse a notebook without a tagged parameters cell, and parameters that the cell does not declare."""
    import nbformat

    try:
        cells = nbformat.read(source, as_version=4).cells
    except (ValueError, KeyError, AttributeError) as error:
        raise NotebookError(f"{source} is not a notebook: {error}") from error
    tagged = [c.source for c in cells if "parameters" in c.metadata.get("tags", [])]
    if not tagged:
        raise NotebookError(
            f"{source} has no cell tagged 'parameters', so it would ignore every parameter; add the tag to its first code cell"
        )
    unknown = set(given) - _assigned(tagged[0])
    if unknown:
        raise ParameterError(
            f"{source.name} declares no parameter {sorted(unknown)[0]!r}; it declares: {', '.join(sorted(_assigned(tagged[0])))}"
        )


def _keep(source: Path, target: Path) -> Path:
    """Rename `source` to `target` (one file system: staging lies inside the output folder)."""
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
    return target
