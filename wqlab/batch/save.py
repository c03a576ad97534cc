"""Write a figure: ``<stem>.svg``, ``.png``, ``.csv`` (the table behind it) and, last, the sidecar ``<stem>.json``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqlab import claims, experiments, figures, paths, records
from wqlab.profile import environment
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The files of one figure. The sidecar comes last: where it is, the others are whole.
SUFFIXES = (".svg", ".png", ".csv", ".json")


def command(stem: str, parameters: dict[str, Any]) -> str:
    """Return what a reader types to draw this figure again; parameters at their defaults are left out."""
    fields = experiments.get(stem).Parameters.model_fields
    given = [
        f"{k}={records.dump_json(v).strip() if not isinstance(v, str) else v}"
        for k, v in parameters.items()
        if v != fields[k].default
    ]
    return shlex.join(["wqlab", "figure", stem, *(part for pair in given for part in ("-p", pair))])


def save(result: Result, figure: Figure, out: Path | str | None) -> dict[str, Path]:
    """Write `figure` and its sidecar into the folder `out`; nothing when `out` is None.

    Parameters
    ----------
    result : Result
        From `wqlab.run`.
    figure : matplotlib.figure.Figure
        From `wqlab.draw`.
    out : path or None
        Created when missing.

    Returns
    -------
    dict of str to Path
        Suffix -> file written.

    Raises
    ------
    OutputError
        When the folder is read-only, full or not a folder. Files of an earlier run stay as they were.
    """
    if out is None:
        return {}
    folder = paths.output_dir(out)
    files = {suffix: folder / f"{result.stem}{suffix}" for suffix in SUFFIXES}
    with paths.atomic_path(files[".svg"]) as temporary:
        figures.write(figure, temporary, metadata={"Date": None, "Title": result.stem, "Description": figures.caption(result)})
    with paths.atomic_path(files[".png"]) as temporary:
        figures.write(figure, temporary, dpi=200)
    with paths.atomic_path(files[".csv"]) as temporary:
        result.data.to_csv(temporary, index=False, float_format="%.9g")
    paths.write_text(files[".json"], records.dump_json(sidecar(result, files)))
    return files


def sidecar(result: Result, files: dict[str, Path]) -> dict[str, Any]:
    """Return the sidecar of a figure whose other files are written: all that a reader needs to trust and repeat it."""
    experiment = experiments.get(result.stem)
    return {
        "stem": result.stem,
        "title": experiment.title,
        "paper": experiment.paper,
        "caption": figures.caption(result),
        "parameters": result.parameters,
        "quick": bool(result.parameters.get("quick", False)),
        "evidence": result.evidence_json(),
        "values": {
            name: {"value": v.value, "unit": v.unit, "evidence": result.evidence[v.column].kind}
            for name, v in result.values.items()
        },
        "notes": result.notes,
        "inputs": [{"name": i.name, "sha256": i.sha256} for i in result.inputs],
        "claims": claims.claims_of(result.stem),
        "files": {suffix[1:]: records.sha256_file(path) for suffix, path in files.items() if suffix != ".json"},
        "runtime_s": round(result.runtime_s, 3),
        **environment.provenance(command(result.stem, result.parameters)),
    }
