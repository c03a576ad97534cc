"""From a claim and a folder of sidecars to a verdict."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from wqlab import experiments, paths
from wqlab.claims.schema import Claim, Expect, FromPaper, FromSidecar, ledger, printed
from wqlab.errors import WqlabError

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, and everything that a reader needs to check it.

    Parameters
    ----------
    claim : Claim
        What was judged.
    verdict : str
        One of `VERDICTS`.
    reason : str
        The comparison that was made, or why none could be.
    our_value : float, optional
        The value that judged the claim.
    evidence : str
        Kind and place of that value.
    command, minutes, hardware
        Of the run that made the value; of the entry where none did.
    """

    claim: Claim
    verdict: str
    reason: str
    our_value: float | None
    evidence: str
    command: str | None
    minutes: float | None
    hardware: str

    def row(self) -> dict[str, Any]:
        """Return the row of the ledger."""
        claim = self.claim
        value = printed(claim.evidence.cell).value if isinstance(claim.evidence, FromPaper) else claim.value
        return {
            "id": claim.id,
            "paper": claim.paper,
            "where": claim.where,
            "statement": claim.statement,
            "paper_value": value,
            "our_value": self.our_value,
            "unit": claim.unit,
            "evidence": self.evidence,
            "verdict": self.verdict,
            "command": self.command,
            "minutes": self.minutes,
            "hardware": self.hardware,
            "reason": self.reason,
        }


class _Value(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)
    value: float
    unit: str
    evidence: str


class _Sidecar(BaseModel):
    """The part of a sidecar that the ledger reads."""

    stem: str
    parameters: dict[str, Any]
    quick: bool
    values: dict[str, _Value]
    hardware: dict[str, Any]
    git_commit: str
    command: str
    runtime_s: float


class _CannotJudgeError(Exception):
    """Why a claim stays without a verdict."""


def figures_dir() -> Path:
    """Return the folder of sidecars: the checkout's ``figures``, else ``./figures`` where it exists, else the shipped one."""
    root = paths.checkout()
    if root is not None:
        return root / "figures"
    here = Path("figures")
    return here if here.is_dir() else paths.shipped("figures")


def judge_all(paper: str | None = None, figures: Path | str | None = None) -> list[dict[str, Any]]:
    """Judge every claim of `paper`, or of all papers, and return one row per claim.

    Parameters
    ----------
    paper : str, optional
        ``windowquant`` or another ledger's name.
    figures : path, optional
        The folder of sidecars; default `figures_dir`.
    """
    folder = Path(figures) if figures is not None else figures_dir()
    return [judge(claim, folder).row() for claim in ledger(paper)]


def judge(claim: Claim, figures: Path) -> Judged:
    """Compute the verdict of one claim from the sidecars in `figures` and the printed numbers.

    A missing or damaged file is no error: the verdict is then ``not_testable_here`` and the reason says what to run.
    """
    source = claim.evidence
    if source is None:
        return Judged(claim, "not_testable_here", f"needs {claim.needs}", None, "", claim.command, claim.minutes, claim.hardware)
    run = f"wqlab reproduce {source.stem}" if isinstance(source, FromSidecar) else f"wqlab claims --paper {claim.paper}"
    command = claim.command or run
    try:
        if isinstance(source, FromPaper):
            verdict, reason = _verdict(claim, _cell(claim, source.cell), lambda name: _cell(claim, name))
            return Judged(claim, verdict, reason, None, f"paper: {source.cell}", command, claim.minutes, claim.hardware)
        sidecar = _read(source.stem, figures)
        ours = _value(claim, sidecar, source.value)
        verdict, reason = _verdict(claim, ours, lambda name: _cell(claim, name) if "|" in name else _value(claim, sidecar, name))
    except _CannotJudgeError as error:
        return Judged(claim, "not_testable_here", str(error), None, "", command, claim.minutes, claim.hardware)
    evidence = f"{sidecar.values[source.value].evidence}: figures/{source.stem}.json, {source.value}"
    minutes, hardware = round(sidecar.runtime_s / 60, 2), _hardware_line(sidecar.hardware)
    return Judged(claim, verdict, reason, ours, evidence, sidecar.command, minutes, hardware)


def _verdict(claim: Claim, ours: float, resolve: Callable[[str], float]) -> tuple[str, str]:
    """Return the verdict of the table in the package's docstring, and the comparison in words."""
    words = []
    within = claim.within(ours)
    if within is not None and claim.tolerance is not None:
        inside = "within" if within else "not within"
        words.append(f"{ours:.4g} {claim.unit} is {inside} {claim.tolerance:.0%} of {claim.value:.4g} {claim.unit}")
    directions = []
    for expected in claim.expect:
        holds, text = _direction(ours, expected, resolve)
        directions.append(holds)
        words.append(text)
    all_hold = bool(directions) and all(directions)
    reason = "; ".join(words)
    if claim.inner:
        consistent = within is not False and all(directions)
        return (
            ("not_testable_here", f"the paper agrees with itself here: {reason}")
            if consistent
            else ("inconsistent_in_paper", reason)
        )
    if claim.scope == "proxy":
        return ("direction_holds_on_proxy" if all(directions) else "direction_fails_on_proxy"), reason
    if within:
        return "reproduced", reason
    if all_hold:
        return ("reproduced" if within is None and claim.scope == "same_setup" else "direction_holds"), reason
    return "contradicted", reason


def _direction(ours: float, expected: Expect, resolve: Callable[[str], float]) -> tuple[bool, str]:
    named = f" ({expected.than})" if isinstance(expected.than, str) else ""
    than = resolve(expected.than) if isinstance(expected.than, str) else expected.than
    holds = _OPERATORS[expected.op](ours, than)
    return holds, f"{ours:.4g} {expected.op} {than:.4g}{named} {'holds' if holds else 'fails'}"


def _read(stem: str, figures: Path) -> _Sidecar:
    path, again = figures / f"{stem}.json", f"run wqlab reproduce {stem}"
    if not path.is_file():
        raise _CannotJudgeError(f"no figures/{stem}.json: {again}")
    try:
        sidecar = _Sidecar(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise _CannotJudgeError(f"figures/{stem}.json is damaged ({str(error).splitlines()[0]}): {again}") from error
    if sidecar.stem != stem:
        raise _CannotJudgeError(f"figures/{stem}.json is the sidecar of {sidecar.stem!r}: {again}")
    if sidecar.quick:
        raise _CannotJudgeError(f"figures/{stem}.json is a quick run, which judges nothing: {again}")
    try:
        defaults = experiments.validate(stem, {}).model_dump(mode="json")
    except WqlabError as error:
        raise _CannotJudgeError(f"the defaults of {stem} are not known here: {error}") from error
    for name, value in sidecar.parameters.items():
        if name in defaults and defaults[name] != value:
            raise _CannotJudgeError(f"figures/{stem}.json was made with {name} = {value!r}, not {defaults[name]!r}: {again}")
    return sidecar


def _value(claim: Claim, sidecar: _Sidecar, name: str) -> float:
    stem = sidecar.stem
    if name not in sidecar.values:
        raise _CannotJudgeError(f"figures/{stem}.json has no value {name!r}: run wqlab reproduce {stem}")
    found = sidecar.values[name]
    if found.unit != claim.unit:
        raise _CannotJudgeError(f"{name} is in {found.unit}, the claim in {claim.unit}: like is compared only with like")
    if found.evidence not in claim.accepts:
        raise _CannotJudgeError(f"{name} is {found.evidence}; this claim is judged by {' or '.join(claim.accepts)} values only")
    return found.value


def _cell(claim: Claim, reference: str) -> float:
    cell = printed(reference)
    if cell.unit != claim.unit:
        raise _CannotJudgeError(f"{reference} is in {cell.unit}, the claim in {claim.unit}: like is compared only with like")
    return cell.value


def _hardware_line(hardware: dict[str, Any]) -> str:
    gpus = hardware.get("gpus") or []
    return str(gpus[0]) if gpus else f"{hardware.get('cores', '?')} cores of {hardware.get('cpu', 'an unnamed CPU')}"
