"""Templates of ``kernels/`` to one self-contained CUDA C++ source."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from jinja2 import meta

from wqlab import paths
from wqlab.errors import CompileError, ParameterError, UnknownNameError

_SUFFIX = ".cu.j2"
#: Headers of ours end in .cuh; all others are the system's and stay for the compiler.
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+\.cuh)"[^\n]*\n?', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n?", re.MULTILINE)


def render(template: str, **parameters: object) -> str:
    """Return the CUDA C++ of a template, with the project's own headers written into it.

    Parameters
    ----------
    template : str
        Path below ``kernels/`` without ``.cu.j2``, for example ``"mixed_decode"``.
    **parameters
        Values of the names that the template reads; all of them, and no others.

    Returns
    -------
    str
        A source that needs no file of ``kernels/``: each ``#include "name.cuh"`` is replaced by that header, once.
        ``#include <cuda_fp16.h>`` and other headers of the system stay.

    Raises
    ------
    UnknownNameError
        For a template or header that does not exist; names those that do.
    ParameterError
        For a parameter that is missing, or that the template never reads.
    CompileError
        For a template with a mistake in it.
    """
    folder = paths.shipped("kernels")
    known = [path.relative_to(folder).as_posix().removesuffix(_SUFFIX) for path in folder.rglob(f"*{_SUFFIX}")]
    if template not in known:
        raise UnknownNameError("kernel template", template, known)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # this is C++, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    name = template + _SUFFIX
    try:
        unread = sorted(parameters.keys() - _names_read(environment, name))
        if unread:
            raise ParameterError(f"template {template!r} never reads {', '.join(unread)}; leave it out, or correct its name")
        text = environment.get_template(name).render(**parameters)
    except jinja2.UndefinedError as error:
        given = ", ".join(sorted(parameters)) or "none"
        raise ParameterError(f"template {template!r}: {error.message}; parameters given: {given}") from error
    except jinja2.TemplateSyntaxError as error:
        raise CompileError(f"kernels/{error.name}, line {error.lineno}: {error.message}; correct the template") from error
    except jinja2.TemplateNotFound as error:
        raise UnknownNameError("kernel template", error.name, known) from error
    return _inline(text, folder, set())


def _names_read(environment: jinja2.Environment, name: str) -> set[str]:
    """Return the names that a template and the templates it includes or imports leave to its caller."""
    names: set[str] = set()
    seen, ahead = set(), [name]
    while ahead:
        current = ahead.pop()
        if current in seen:
            continue
        seen.add(current)
        assert environment.loader is not None
        source, _, _ = environment.loader.get_source(environment, current)
        tree = environment.parse(source, name=current)
        names |= meta.find_undeclared_variables(tree)
        ahead += [other for other in meta.find_referenced_templates(tree) if other is not None]
    return names


def _inline(text: str, folder: Path, seen: set[str]) -> str:
    """Replace each include of a header of ours by its text; the second include of the same one by nothing."""

    def header(match: re.Match[str]) -> str:
        name = match[1]
        path = folder / name
        if not path.is_file():
            known = (path.relative_to(folder).as_posix() for path in folder.rglob("*.cuh"))
            raise UnknownNameError("kernel header", name, known)
        if name in seen:
            return ""
        seen.add(name)
        # NVRTC warns of the pragma in a main file, and `seen` does its work.
        body = _inline(_PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8")), folder, seen)
        return f"// ---- {name}\n{body.rstrip()}\n// ---- end of {name}\n"

    return _INCLUDE.sub(header, text)
