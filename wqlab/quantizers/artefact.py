"""Files of what was learnt: safetensors with a format name and a checksum of their content in the header."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from wqlab import paths
from wqlab.errors import DamagedFileError

_CHECKSUM = "sha256"


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write `tensors` with the words `about`, ``format`` among them; a file of that name is replaced only by a whole one.

    Raises
    ------
    OutputError
        When it cannot be written.
    """
    from safetensors.torch import save_file

    held = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    paths.output_dir(path.parent)
    with paths.atomic_path(path) as temporary:
        save_file(held, temporary, metadata={**about, _CHECKSUM: _checksum(held)})


def read(path: Path, format_name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and words of a file of `write`, on the CPU.

    Raises
    ------
    FileNotFoundError
        When there is none.
    DamagedFileError
        When it is another format or version, or its content is not what was written; it stays as it is.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; learn it first")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}); it was left as it is: learn it again under another name") from error
    if about.get("format") != format_name:
        raise DamagedFileError(f"{path} has format {about.get('format')!r}, not {format_name}; learn it again with this version")
    if about.get(_CHECKSUM) != _checksum(tensors):
        raise DamagedFileError(f"{path} is damaged (its checksum differs); it was left as it is: learn it again under another name")
    return tensors, {name: said for name, said in about.items() if name != _CHECKSUM}


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        content.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        content.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return content.hexdigest()
