"""What one entry of the ledger holds, and how the files are read and checked."""

from __future__ import annotations

import csv
import math
import pkgutil
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wqlab import experiments, paths
from wqlab.errors import DamagedFileError, UnknownNameError

Scope = Literal["same_setup", "same_mechanism", "proxy"]
Kind = Literal["measured", "recorded", "simulated"]
Operator = Literal["<", "<=", ">", ">=", "==", "!="]

#: Every verdict, in the order in which summaries list them.
VERDICTS = (
    "reproduced",
    "direction_holds",
    "direction_holds_on_proxy",
    "contradicted",
    "direction_fails_on_proxy",
    "inconsistent_in_paper",
    "not_testable_here",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FromSidecar(_Strict):
    """A named value of ``figures/<stem>.json``."""

    stem: str
    value: str


class FromPaper(_Strict):
    """A printed number: ``"file | row | column"`` of ``data/paper``."""

    cell: str


class Expect(_Strict):
    """A direction: our value `op` `than`, a number, the name of a value of the same sidecar, or a printed cell."""

    op: Operator
    than: float | str


class Claim(_Strict):
    """One claim of a paper. The header of ``data/claims/windowquant.yml`` explains the fields.

    Raises
    ------
    pydantic.ValidationError
        For an unknown field, scope or operator, a number without unit or tolerance, a proxy without a direction, or an entry
        that has neither evidence nor `needs`.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    paper: str
    where: str
    statement: str
    value: float | None = None
    unit: str | None = None
    tolerance: float | None = Field(None, ge=0)
    expect: tuple[Expect, ...] = ()
    scope: Scope
    inner: bool = False
    evidence: FromSidecar | FromPaper | None
    accepts: tuple[Kind, ...] = ("measured", "recorded")
    command: str | None = None
    minutes: float | None = Field(None, ge=0)
    hardware: str
    needs: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.value is not None and self.tolerance is None:
            raise ValueError("a numeric claim needs a tolerance (a fraction of the value)")
        if self.value is None and self.tolerance is not None:
            raise ValueError("a tolerance needs a value")
        if (self.value is not None or self.evidence is not None) and not self.unit:
            raise ValueError("a value needs a unit")
        if self.evidence is None and not self.needs:
            raise ValueError("without evidence the entry must say what it needs")
        if self.evidence is not None and self.value is None and not self.expect:
            raise ValueError("evidence needs something to compare with: a value or an expectation")
        if self.evidence is not None and self.scope == "proxy" and not self.expect:
            raise ValueError("a proxy can only show a direction: give `expect`")
        if isinstance(self.evidence, FromPaper) and not self.inner:
            raise ValueError("printed numbers can only show that a paper disagrees with itself: set `inner: true`")
        return self

    @property
    def stem(self) -> str | None:
        """The stem whose sidecar judges this claim, or None."""
        return self.evidence.stem if isinstance(self.evidence, FromSidecar) else None

    @property
    def rule(self) -> tuple[Any, ...]:
        """What must not change after a measurement: value, tolerance, scope and directions."""
        return (self.value, self.tolerance, self.scope, self.expect)

    def within(self, ours: float) -> bool | None:
        """Tell whether `ours` lies within the tolerance of the printed value; None where the claim has no number."""
        if self.value is None or self.tolerance is None:
            return None
        allowed = self.tolerance * abs(self.value)
        return abs(ours - self.value) <= allowed * (1 + 1e-9)  # 2.2 is within 10 % of 2, in binary too


class Cell(NamedTuple):
    """A printed number with its unit."""

    value: float
    unit: str


def papers() -> list[str]:
    """Return the names of the papers that have a ledger."""
    return sorted(path.stem for path in _folder().glob("*.yml"))


def ledger(paper: str | None = None) -> list[Claim]:
    """Return the claims of `paper`, or of every paper, in the order of the file.

    Raises
    ------
    UnknownNameError
        For a paper without a ledger.
    DamagedFileError
        For an entry that breaks a rule; names the file, the entry and the rule.
    """
    if paper is not None and paper not in papers():
        raise UnknownNameError("paper", paper, papers())
    claims = [c for name in papers() for c in read(_folder() / f"{name}.yml")]
    _refuse_twice([c.id for c in claims], "the ledgers together")
    return [c for c in claims if paper in (None, c.paper)]


def claims_of(stem: str) -> list[str]:
    """Return the ids of the claims that the sidecar of `stem` judges."""
    return [c.id for c in ledger() if c.stem == stem]


def read(path: Path) -> list[Claim]:
    """Read one ledger and check it against the stems and the printed numbers that exist.

    Raises
    ------
    DamagedFileError
        Naming the file, the entry and the rule that it breaks.
    """
    claims = parse(path.read_text(encoding="utf-8"), path.name, path.stem)
    stems = [module.name for module in pkgutil.iter_modules(experiments.__path__)]
    for claim in claims:
        if claim.stem is not None and claim.stem not in stems:
            raise DamagedFileError(f"{path.name}, entry {claim.id}: {UnknownNameError('stem', claim.stem, stems)}")
        cells = [claim.evidence.cell] if isinstance(claim.evidence, FromPaper) else []
        for reference in [*cells, *(e.than for e in claim.expect if isinstance(e.than, str) and "|" in e.than)]:
            try:
                printed(reference)
            except UnknownNameError as error:
                raise DamagedFileError(f"{path.name}, entry {claim.id}: {error}") from error
    return claims


def parse(text: str, file: str, paper: str) -> list[Claim]:
    """Return the entries of a ledger's text; `file` is named in errors, `paper` is the file's stem."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DamagedFileError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or content.get("paper") != paper or not isinstance(content.get("claims"), list):
        raise DamagedFileError(f"{file} must hold `paper: {paper}` and a list `claims`")
    claims = []
    for number, entry in enumerate(content["claims"], start=1):
        if not isinstance(entry, dict):
            raise DamagedFileError(f"{file}, entry {number} is not a mapping")
        try:
            claims.append(Claim(**{"paper": paper, **entry}))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            named = f"{field} = {first['input']!r}: " if field else ""
            raise DamagedFileError(f"{file}, entry {entry.get('id', number)}: {named}{first['msg']}") from error
    _refuse_twice([c.id for c in claims], file)
    return claims


def printed(reference: str) -> Cell:
    """Return the number printed at ``"file | row | column"`` of ``data/paper``.

    Raises
    ------
    UnknownNameError
        For a file, row or column that is not there.
    """
    parts = [part.strip() for part in reference.split("|")]
    cells = _cells(paths.shipped("data") / "paper" / f"{parts[0]}.csv") if len(parts) == 3 else {}
    try:
        return cells[(parts[1], parts[2])]
    except (KeyError, IndexError):
        known = [" | ".join((parts[0], *key)) for key in cells]
        raise UnknownNameError("printed number", reference, known or ["file | row | column of data/paper"]) from None


@lru_cache(maxsize=32)
def _cells(path: Path) -> dict[tuple[str, str], Cell]:
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        cells = {(row["row"], row["column"]): Cell(float(row["value"]), row["unit"]) for row in csv.DictReader(file)}
    bad = [key for key, cell in cells.items() if not math.isfinite(cell.value)]
    if bad:
        raise DamagedFileError(f"{path.name}: {' | '.join(bad[0])} is not a finite number")
    return cells


def _folder() -> Path:
    return paths.shipped("data") / "claims"


def _refuse_twice(ids: list[str], where: str) -> None:
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise DamagedFileError(f"{where}: more than one entry has the id {', '.join(twice)}")
