"""Real video clips for window experiments."""

from __future__ import annotations

from pathlib import Path

from wqlab.errors import UnknownNameError
from wqlab.models import catalog, fetch

#: Clip name -> its file in the catalogue.
_FILES = {Path(member.path).stem: member.path for member in catalog.PARTS["clips"].members}


def clip_names() -> list[str]:
    """Return the names that `clip_path` knows, sorted."""
    return sorted(_FILES)


def clip_path(name: str) -> Path:
    """Return the checked path of a clip, fetching the clips when they are absent.

    Raises
    ------
    UnknownNameError
        With the closest names.
    FetchError, DamagedFileError, OutputError
        As `wqlab.models.fetch.fetch`.
    """
    if name not in _FILES:
        raise UnknownNameError("clip", name, _FILES)
    return fetch.file_of("clips", _FILES[name])
