"""What the command shows: tables and results on stdout, bars and messages on stderr, bars only where it is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from wqlab.progress import listening

# Off a terminal rich assumes 80 columns and would fold tables that go to a file or a pipe.
out = Console(width=None if sys.stdout.isatty() else 220)
err = Console(stderr=True)


def print_json(value: Any) -> None:
    """Print strict JSON."""
    from wqlab.records import dump_json

    typer.echo(dump_json(value), nl=False)


@contextmanager
def bar(text: str) -> Iterator[None]:
    """Show what runs, how far it is where it reports, and for how long. Only on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as shown:
        task = shown.add_task(text, total=None)
        with listening(lambda what, done, total: shown.update(task, description=f"{text}: {what}", completed=done, total=total)):
            yield


@contextmanager
def fetch_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show what is fetched and how much of it is here; gives the callback that fetching reports to. Only on a terminal."""
    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as shown:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name)
            shown.update(tasks[name], completed=done, total=total)

        yield advance


@contextmanager
def steps(text: str, lines: Console = out) -> Iterator[Callable[[str, str, str], None]]:
    """Print a line per finished stem, on stderr one per failed stem; on a terminal show what runs and how many are done as well."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as shown:
        overall = shown.add_task(text)
        running: dict[str, Any] = {}
        began: dict[str, float] = {}

        def tell(stem: str, event: str, detail: str) -> None:
            if event == "planned":
                shown.update(overall, total=int(detail))
                return
            if event == "started":
                began[stem] = time.perf_counter()
                running[stem] = shown.add_task(stem, total=None)
                return
            if stem in running:
                shown.remove_task(running.pop(stem))
            shown.advance(overall)
            seconds = f" ({time.perf_counter() - began[stem]:.1f} s)" if stem in began else ""
            stream = err if event == "failed" else lines
            stream.print(f"{event:8s} {stem}{seconds}: {one_line(detail)}", highlight=False, soft_wrap=True, markup=False)

        yield tell


def one_line(text: object) -> str:
    """Return `text` without line breaks and repeated spaces."""
    return " ".join(str(text).split())
