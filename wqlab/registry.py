"""One registry: (kind, name) -> class or function, filled by a decorator.

A new quantizer, experiment, figure or bench is one new file in its package: the registry imports ``<package>.<name>`` when
a name is first asked for, and the whole package when all names are asked for. Nothing else has to be edited.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from wqlab.errors import UnknownNameError

#: kind -> packages whose modules register names of that kind. `add_package` extends it (plug-ins, tests).
_PACKAGES: dict[str, list[str]] = {
    "method": ["wqlab.quantizers"],
    "policy": ["wqlab.cache"],
    "scorer": ["wqlab.windows.scorers"],
    "model": ["wqlab.models"],
    "adapter": ["wqlab.hf.adapters"],
    "protocol": ["wqlab.evals.protocols"],
    "bench": ["wqlab.bench"],
    "stem": ["wqlab.experiments"],
    "figure": ["wqlab.figures"],
    "task": ["wqlab.evals.pocketbench.tasks"],
}
_ENTRIES: dict[str, dict[str, Any]] = {kind: {} for kind in _PACKAGES}

T = TypeVar("T")


def register(kind: str, name: str) -> Callable[[T], T]:
    """Decorate a class or function so that `lookup` finds it.

    Parameters
    ----------
    kind : str
        One of ``method``, ``policy``, ``scorer``, ``model``, ``adapter``, ``protocol``, ``bench``, ``stem``, ``figure``.
    name : str
        Lower snake case; equal to the module's file name where one file holds one name.

    Raises
    ------
    ValueError
        If another object already holds the name.
    """

    def decorate(entry: T) -> T:
        entries = _ENTRIES[kind]
        previous = entries.get(name)
        if previous is not None and previous.__module__ != entry.__module__:
            raise ValueError(f"{kind} {name!r} is registered by {previous.__module__} and again by {entry.__module__}")
        entries[name] = entry
        return entry

    return decorate


def add_package(kind: str, package: str) -> None:
    """Search `package` (an importable name) for entries of `kind` as well."""
    if package not in _PACKAGES[kind]:
        _PACKAGES[kind].append(package)


def packages(kind: str) -> list[str]:
    """Return the packages that are searched for entries of `kind`."""
    return list(_PACKAGES[kind])


def lookup(kind: str, name: str) -> Any:
    """Return the entry `name` of `kind`, importing the module of that name first.

    Raises
    ------
    UnknownNameError
        With the closest known names.
    """
    entries = _ENTRIES[kind]
    if name not in entries and isinstance(name, str) and name.isidentifier():
        for package in _PACKAGES[kind]:
            module = f"{package}.{name}"
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
    if name not in entries:
        known = names(kind)  # imports every module of the kind
        if name not in entries:
            raise UnknownNameError(kind, name, known)
    return entries[name]


def names(kind: str) -> list[str]:
    """Return all registered names of `kind`, sorted; imports every module of its packages."""
    for package in _PACKAGES[kind]:
        paths = importlib.import_module(package).__path__
        for module in pkgutil.iter_modules(paths):
            importlib.import_module(f"{package}.{module.name}")
    return sorted(_ENTRIES[kind])
