"""Load a causal language model by catalogue name, local folder or hub id, with its weights checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from wqlab.errors import DamagedFileError, ParameterError, UnknownNameError
from wqlab.models import catalog, hub, manifest, shipped, smollm2, weights
from wqlab.types import Input

if TYPE_CHECKING:
    import torch


_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model, ready to run, and what a figure must say about it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode, on the CPU.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    name : str
        As it was asked for.
    note : str
        Which weights these are.
    inputs : list of Input
        The weight files with their sha256.
    """

    model: Any
    tokenizer: Any
    name: str
    note: str
    inputs: list[Input] = field(default_factory=list)


def load(model: str | Path = "smollm2", dtype: str | torch.dtype = "float32", attn_implementation: str = "sdpa") -> LanguageModel:
    """Load a language model; one of the catalogue is fetched and converted first when it is absent.

    Parameters
    ----------
    model : str or Path
        A name of the catalogue (``"smollm2"``), ``"pocket-vlm"``, a local transformers folder, or a hub id (``"owner/name"``).
    dtype : {"float32", "float16", "bfloat16"} or torch.dtype
        Of the weights in memory.
    attn_implementation : str
        Any name that transformers knows, registered ones included.

    Raises
    ------
    UnknownNameError
        When `model` is none of them.
    ParameterError
        For another dtype or attention, or a folder without a model.
    FetchError
        When something has to be downloaded and cannot be.
    DamagedFileError
        When a weight file is damaged. One of the cache is kept under another name; a file of yours is left as it is.
    OutputError
        When the cache folder cannot be written.
    MissingPartError
        For ``"pocket-vlm"`` when its trained part did not come with wqlab.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ParameterError(f"dtype = {str(dtype)!r} is not one of {', '.join(_DTYPES)}")
    model = str(model)
    if model == shipped.POCKET_VLM:
        from wqlab.models import pocket  # here, because it is built on this module

        return pocket.load(dtype=name, attn_implementation=attn_implementation)
    if model == smollm2.NAME:
        folder, noted = smollm2.folder(), manifest.parse(smollm2.folder())
        # 0.25 s for 269 MB where the CPU hashes in hardware: cheap against numbers from flipped bits.
        for file in noted.files if noted else ():
            if (folder / file.path).exists():
                manifest.verify(folder, file, f"wqlab models fetch {model}")
        smollm2.build()
        found = manifest.parse(folder)
        assert found is not None
        note = found.note
        inputs = [Input(f"{model}/{file.path}", file.sha256) for file in found.files if file.path.endswith(".safetensors")]
    elif model and Path(model).expanduser().is_dir():
        folder = Path(model).expanduser()
        note, inputs = f"weights of the local folder {folder.name}", weights.check_folder(folder)
    elif re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        folder, revision = hub.snapshot(model)
        note = f"weights of {model} from the hub, revision {revision[:12]}"
        inputs = weights.check_folder(folder, model)
    else:
        known = [part.name for part in catalog.PARTS.values() if part.kind == "language model"] + [shipped.POCKET_VLM]
        unknown = UnknownNameError("model", model, known)
        unknown.args = (f"{unknown}; a local transformers folder or a hub id (owner/name) is accepted too",)
        raise unknown
    loaded, tokenizer = _from_pretrained(folder, name, attn_implementation)
    return LanguageModel(loaded, tokenizer, model, note, inputs)


def _from_pretrained(folder: Path, dtype: str, attn_implementation: str) -> tuple[Any, Any]:
    """Load model and tokenizer of a checked folder; nothing is looked up elsewhere."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # a library does not draw on somebody's terminal or into a notebook's output
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, EOFError, UnpicklingError) as error:
        said = str(error).strip() or type(error).__name__
        raise ParameterError(f"transformers cannot load {folder}: {said.splitlines()[0]}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if info["missing_keys"]:  # transformers would go on with random numbers in their place
        lost = sorted(info["missing_keys"])
        raise DamagedFileError(
            f"{folder} lacks {len(lost)} weights of its model, for example {lost[0]}; replace it with a whole copy"
        )
    return model.eval(), tokenizer
