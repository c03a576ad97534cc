"""The file with what was trained: projector and LoRA in float16, nothing of the parts that are fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wqlab import paths
from wqlab.errors import DamagedFileError
from wqlab.models import shipped
from wqlab.models.pocket.lora import LoRALinear, lora_state
from wqlab.models.pocket.projector import PocketProjector
from wqlab.records import dump_json, sha256_file


@dataclass(frozen=True)
class TrainedPart:
    """What `read_adapter` finds.

    Parameters
    ----------
    projector : dict of str to Tensor
        State dict of a `PocketProjector` (float16).
    lora : dict of str to Tensor
        As `wqlab.models.pocket.lora.lora_state` (float16).
    meta : dict
        ``rank``, ``scale``, ``hidden`` and what the training added.
    sha256 : str
        Of the file.
    """

    projector: dict[str, Tensor]
    lora: dict[str, Tensor]
    meta: dict[str, Any]
    sha256: str


def write_adapter(path: Path | str, projector: PocketProjector, language_model: nn.Module, meta: Mapping[str, Any]) -> str:
    """Write projector and LoRA as safetensors and, beside it, a JSON with its sha256, each atomically.

    Parameters
    ----------
    path : Path or str
        Ends with ``.safetensors``.
    projector : PocketProjector
    language_model : LlamaForCausalLM or LlamaModel
        With adapters injected.
    meta : mapping
        What else a reader must know (JSON): data, seed, steps, hardware. Rank, scale and width are added.

    Returns
    -------
    str
        The file's sha256.

    Raises
    ------
    OutputError
        When the folder cannot be written.
    """
    from safetensors.torch import save_file

    path = Path(path)
    adapters = [module for module in language_model.modules() if isinstance(module, LoRALinear)]
    facts = {
        **meta,
        "rank": adapters[0].a.shape[0],
        "scale": adapters[0].scale,
        "features": list(projector.features),
        "hidden": projector.inner.out_features,
        "out": projector.outer.out_features,
    }
    tensors = {f"projector.{name}": value for name, value in projector.state_dict().items()}
    tensors |= {f"lora.{name}": value for name, value in lora_state(language_model).items()}
    halves = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in tensors.items()}
    with paths.atomic_path(path) as temporary:
        save_file(halves, temporary, metadata={"format": "pt", "wqlab": json.dumps(facts, sort_keys=True)})
        temporary.chmod(0o644)  # safetensors makes its file readable by its owner only
    sha256 = sha256_file(path)
    paths.write_text(path.with_suffix(".json"), dump_json({"sha256": sha256, "num_bytes": path.stat().st_size, **facts}))
    return sha256


def read_adapter(path: Path | str) -> TrainedPart:
    """Read a file of `write_adapter` after its checksum was compared.

    Raises
    ------
    MissingPartError
        When there is no such file.
    DamagedFileError
        When the checksum differs, or the file is no trained part of a pocket VLM.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    sha256 = shipped.verify(path)
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})["wqlab"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DamagedFileError(f"{path} is no trained part of a pocket VLM ({error}); make it with: {shipped.TRAIN}") from error

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    return TrainedPart(below("projector."), below("lora."), meta, sha256)


def projector_of(part: TrainedPart) -> PocketProjector:
    """Return the projector of a trained part (float32).

    Raises
    ------
    DamagedFileError
        When its tensors do not fit the sizes that it states.
    """
    try:
        projector = PocketProjector(part.meta["features"], hidden=part.meta["hidden"], out=part.meta["out"])
        projector.load_state_dict(part.projector)
    except (RuntimeError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"the trained part does not fit this version of the pocket VLM ({str(error).splitlines()[0]}); "
            f"make it with: {shipped.TRAIN}"
        ) from error
    return projector
