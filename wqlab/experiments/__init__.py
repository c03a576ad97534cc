"""Experiments: validated parameters -> a tidy table with the evidence of each column.

One file per stem. An experiment is the only place that decides whether a column is measured, recorded or simulated.
"""

from __future__ import annotations

import difflib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wqlab import registry
from wqlab.errors import ParameterError
from wqlab.models.catalog import PARTS
from wqlab.models.shipped import POCKET_VLM, POCKET_VLM_PARTS
from wqlab.types import Result


class Parameters(BaseModel):
    """Base of every experiment's parameters: unknown names, NaN and infinity are refused.

    Parameters
    ----------
    quick : bool
        A smaller input for a first look and for tests; the sidecar says so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    quick: bool = Field(False, description="a smaller input for a first look")

    @model_validator(mode="before")
    @classmethod
    def _plain_scalars(cls, given: Any) -> Any:
        """Turn numpy and torch scalars into Python numbers, so that they validate and can be written as JSON."""
        if not isinstance(given, Mapping):
            return given
        return {k: v.item() if hasattr(v, "item") and getattr(v, "ndim", None) == 0 else v for k, v in given.items()}


def slider(default: float, low: float, high: float, step: float, description: str, **limits: Any) -> Any:
    """Declare a parameter that notebooks show as a slider from `low` to `high`; `limits` are pydantic's (gt, ge, lt, le)."""
    return Field(default, description=description, json_schema_extra={"slider": {"low": low, "high": high, "step": step}}, **limits)


P = TypeVar("P", bound=Parameters)


class Experiment(ABC, Generic[P]):
    """One figure's or table's data. Register a subclass with ``@register("stem", name)``.

    Attributes
    ----------
    stem, title : str
        The name of every file of this figure, and its heading.
    paper : str
        What it reproduces, for example ``"WindowQuant, Fig. 8"``.
    Parameters : type
        The pydantic model of its parameters.
    live : bool
        Whether a slider may redraw while it moves; False for what measures for seconds: it then redraws on release.
    """

    stem: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    Parameters: ClassVar[type[Parameters]]
    live: ClassVar[bool] = True

    def parts(self, parameters: P) -> list[str]:
        """Return the catalogue names of what must be fetched before `run`; by default those of the parameter ``model``."""
        model = getattr(parameters, "model", None)
        if model == POCKET_VLM:
            return list(POCKET_VLM_PARTS)
        return [model] if model in PARTS else []

    @abstractmethod
    def run(self, parameters: P) -> Result:
        """Compute the table. Expensive parts are cached by their own inputs, so that a slider stays fast."""


def get(stem: str) -> Experiment[Any]:
    """Return the experiment of `stem`; raises UnknownNameError with the closest stems."""
    return registry.lookup("stem", stem)()  # type: ignore[no-any-return]


def stems() -> list[str]:
    """Return every stem, sorted."""
    return registry.names("stem")


def validate(stem: str, given: Mapping[str, Any]) -> Parameters:
    """Return the validated parameters of `stem`.

    Raises
    ------
    ParameterError
        Naming the parameter, the value and the limit, on one line.
    """
    model = get(stem).Parameters
    unknown = [name for name in given if name not in model.model_fields]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), model.model_fields, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ParameterError(f"{stem} has no parameter {unknown[0]!r}: {hint}known: {', '.join(sorted(model.model_fields))}")
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "parameters"
        why = first["msg"].removeprefix("Value error, ")  # what pydantic puts before a validator's own words
        raise ParameterError(f"{stem}: {name} = {first['input']!r} is refused: {why}") from error


def fetch_parts(stem: str, given: Mapping[str, Any], progress: Callable[[str, int, int], None] | None = None) -> None:
    """Fetch what `stem` needs and is not here yet, so that a progress bar can be shown before it runs.

    Raises
    ------
    FetchError, DamagedFileError, OutputError
        As `wqlab.models.fetch.fetch`.
    """
    needed = get(stem).parts(validate(stem, given))
    if needed:
        from wqlab.models.fetch import fetch

        fetch(needed, progress=progress)


def run(stem: str, **given: Any) -> Result:
    """Validate `given`, run the experiment of `stem` and return its result.

    Raises
    ------
    UnknownNameError, ParameterError
        For a stem, name or value that cannot be.
    MissingPartError
        When a part is missing; says how to get it.
    """
    parameters = validate(stem, given)
    started = time.perf_counter()
    result: Result = get(stem).run(parameters)
    result.runtime_s = time.perf_counter() - started
    return result
