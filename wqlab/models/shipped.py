"""The weights that travel with the package: where they lie and whether they are whole. Cheap to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wqlab import paths
from wqlab.errors import DamagedFileError, MissingPartError
from wqlab.records import sha256_file

POCKET_VLM = "pocket-vlm"
TRAIN = "wqlab models train-pocket"
#: The parts of the catalogue that the pocket VLM is built on.
POCKET_VLM_PARTS = ("smollm2", "efficientnet_lite0")


def folder(name: str = POCKET_VLM) -> Path:
    """Return the folder of the shipped model `name` (it may not exist)."""
    return paths.shipped("data") / "models" / name


def weights_path(base: Path | None = None) -> Path:
    """Return the path of the trained part of the pocket VLM in `base`, by default in the shipped folder."""
    return (base if base is not None else folder()) / f"{POCKET_VLM}.safetensors"


def sidecar(weights: Path) -> dict[str, Any]:
    """Return the JSON beside a weight file, {} when there is none or it cannot be read."""
    try:
        found = json.loads(weights.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def verify(weights: Path) -> str:
    """Check a weight file against the sha256 in the JSON beside it, and return the sha256.

    Raises
    ------
    MissingPartError
        When there is no such file.
    DamagedFileError
        When the checksums differ or there is none; the file stays as it is.
    """
    if not weights.is_file():
        raise MissingPartError(
            f"{weights.name} is not in {weights.parent}: take it from the project's repository, or train it: {TRAIN} (needs a GPU)"
        )
    noted, found = sidecar(weights).get("sha256"), sha256_file(weights)
    if found != noted:
        said = f"says {str(noted)[:12]}..." if noted else "is missing or has none"
        raise DamagedFileError(
            f"{weights} is damaged: its sha256 is {found[:12]}..., {weights.with_suffix('.json').name} {said}; "
            f"it was left as it is: restore both, in a checkout with git checkout -- data/models/{POCKET_VLM}, "
            "else by reinstalling wqlab"
        )
    return found


def status() -> dict[str, Any]:
    """Return the row of `wqlab models list`; sizes only, so that asking costs nothing."""
    weights = weights_path()
    size = weights.stat().st_size if weights.is_file() else 0
    whole = size > 0 and size == sidecar(weights).get("num_bytes")
    return {
        "name": POCKET_VLM,
        "kind": "video-language model",
        "description": f"small video-language model on {' and '.join(POCKET_VLM_PARTS)}; its trained part comes with wqlab",
        "licence": "Apache-2.0",
        "download_bytes": 0,
        "fetched": whole,
        "bytes": size if whole else 0,
        "path": str(weights.parent),
        "source": "shipped with wqlab" if whole else None,
        "get": TRAIN,
    }
