"""Where things are: the data that travels with the package, the user's cache, and safe ways to write a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from wqlab.errors import OutputError

_PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """Return the root of the git checkout this package runs from, or None when it runs from an installed wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir() else None


def shipped(name: str) -> Path:
    """Return the folder `name` (``data``, ``notebooks``, ``kernels``) that travels with the package.

    In a checkout it lies beside the package, in a wheel inside it, under ``wqlab/_shipped``.
    """
    root = checkout()
    return root / name if root else _PACKAGE / "_shipped" / name


def cache_dir() -> Path:
    """Return the folder for downloaded and derived files: ``$WQLAB_CACHE``, else the platform's user cache."""
    given = os.environ.get("WQLAB_CACHE")
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("wqlab"))


def output_dir(path: Path | str) -> Path:
    """Create `path` if needed and prove that it can be written.

    Raises
    ------
    OutputError
        When it cannot be created or written; the message says why.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".wqlab-"):
            pass
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {error.strerror or error}; name another folder with --out") from error
    return path


@contextmanager
def atomic_path(target: Path | str) -> Iterator[Path]:
    """Give a temporary path beside `target`; when the block ends well it is renamed to `target`, else removed.

    A reader therefore sees the old file or the whole new one, never half a file. Missing folders are created.

    Raises
    ------
    OutputError
        When the folder cannot be written or is full.
    """
    target = Path(target)
    # The suffix stays last, so that writers which look at it (matplotlib, pandas) choose the right format.
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.tmp{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"cannot write {target}: {error.strerror or error}; free some space or name another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path | str, text: str) -> None:
    """Write `text` to `target` as UTF-8, atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
