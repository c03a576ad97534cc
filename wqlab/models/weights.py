"""Checks of a transformers folder, before transformers is asked to load it."""

from __future__ import annotations

from pathlib import Path

from wqlab.errors import DamagedFileError, ParameterError
from wqlab.records import sha256_file
from wqlab.types import Input

#: The first pattern that a folder has files of is what transformers loads.
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def check_folder(folder: Path, name: str | None = None) -> list[Input]:
    """Check that `folder` holds a model whose safetensors are whole; return its weight files as inputs.

    Parameters
    ----------
    folder : Path
        It is only read.
    name : str, optional
        What the inputs are called; default: the folder's name.

    Raises
    ------
    ParameterError
        When there is no config.json or no weight file.
    DamagedFileError
        Naming the file, which stays as it is.
    """
    if not (folder / "config.json").is_file():
        raise ParameterError(f"{folder} is no transformers model folder: it has no config.json")
    weights = next((found for pattern in _PATTERNS if (found := sorted(folder.glob(pattern)))), [])
    if not weights:
        raise ParameterError(f"{folder} has a config.json but no weights ({' or '.join(_PATTERNS)})")
    for path in weights:
        if path.suffix == ".safetensors":
            _check_safetensors(path)
    return [Input(f"{name or folder.resolve().name}/{path.name}", sha256_file(path)) for path in weights]


def _check_safetensors(path: Path) -> None:
    """Check that the header can be read and that the file is as long as it says; raises DamagedFileError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}); it was left as it is: replace it with a whole copy") from error
