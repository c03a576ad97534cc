"""The errors a user can meet. Each message says what was wrong, the value, the limit, and what to do next.

Every class derives from :class:`WqlabError`, so the command line can print one readable line and library users can catch
the whole family with one name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WqlabError(Exception):
    """Base of every error that wqlab raises on purpose."""


class UnknownNameError(WqlabError, LookupError):
    """A name that is in no registry: a stem, method, model, GPU or bench.

    Parameters
    ----------
    kind : str
        What was looked up, for example ``"stem"``.
    name : object
        The name as given.
    known : iterable of str
        The names that exist; the closest ones are suggested.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        close = difflib.get_close_matches(str(name), self.known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        super().__init__(f"unknown {kind} {str(name)!r}: {hint}known: {', '.join(self.known) or 'none'}")


class ParameterError(WqlabError, ValueError):
    """A parameter with a wrong name or a value outside its limits."""


class NonFiniteError(WqlabError, ValueError):
    """NaN or infinity where numbers are needed, for example in K or V."""


class UnsupportedError(WqlabError, NotImplementedError):
    """An operation or a shape that this part cannot serve."""


class RecordError(WqlabError):
    """A record whose table does not match its provenance or its schema."""


class LimitError(WqlabError):
    """A measured result outside a limit that it has to keep. It has been recorded; the message names the cases."""


class DamagedFileError(WqlabError):
    """A file whose content does not match its checksum or its format. The damaged file is kept, under another name."""


class FetchError(WqlabError):
    """A download that could not be made: no network, no such package, no such source."""


class MissingPartError(WqlabError):
    """A result that needs a part which is not here. The message names the part and how to get it."""


class OutputError(WqlabError, OSError):
    """An output folder that cannot be written: read-only, full, or not a folder."""


class NotebookError(WqlabError):
    """A notebook that failed, or that ended without writing its output."""


class CompileError(WqlabError):
    """A template that cannot be rendered, or CUDA C++ that the compiler refuses. The message shows the lines."""


class KernelError(WqlabError):
    """A compiled kernel that the CUDA driver refuses to load or to launch."""
