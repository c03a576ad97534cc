"""Put the pocket VLM together: fetched language model, fetched encoder, and what was trained here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wqlab.errors import DamagedFileError
from wqlab.models import catalog, language, shipped
from wqlab.models.language import LanguageModel
from wqlab.models.pocket import lora
from wqlab.models.pocket.adapter_file import projector_of, read_adapter
from wqlab.models.pocket.configuration import PocketVLMConfig
from wqlab.models.pocket.modeling import PocketVLMForConditionalGeneration
from wqlab.models.pocket.processing import PocketVLMProcessor
from wqlab.models.pocket.projector import PocketProjector
from wqlab.models.pocket.prompt import CHAT_TEMPLATE
from wqlab.models.pocket.vision import EfficientNetLite0, load_vision
from wqlab.types import Input


@dataclass(frozen=True, kw_only=True)
class LoadedVLM(LanguageModel):
    """A `LanguageModel` that also sees.

    Parameters
    ----------
    processor : PocketVLMProcessor
        Makes the model's inputs of words and videos.
    """

    processor: Any


def assemble(language_model: Any, vision: EfficientNetLite0, projector: PocketProjector) -> PocketVLMForConditionalGeneration:
    """Return a pocket VLM made of these very modules, in evaluation mode; nothing is copied.

    Parameters
    ----------
    language_model : LlamaForCausalLM
        Plain: LoRA already merged.
    vision : EfficientNetLite0
        Stays in its own dtype.
    projector : PocketProjector
        Brought to the language model's dtype and device.
    """
    config = PocketVLMConfig(
        text_config=language_model.config,
        projector_hidden_size=projector.inner.out_features,
        tie_word_embeddings=language_model.config.tie_word_embeddings,
        dtype=language_model.dtype,
        attn_implementation=language_model.config._attn_implementation,
    )
    with torch.device("meta"):  # its own weights are replaced at once
        model = PocketVLMForConditionalGeneration(config)
    model.model.language_model = language_model.model
    model.model.vision_tower = vision
    model.model.multi_modal_projector = projector.to(language_model.device, language_model.dtype)
    model.lm_head = language_model.lm_head
    model.generation_config = language_model.generation_config
    model.eval()
    return model


def load(folder: Path | str | None = None, dtype: str | torch.dtype = "float32", attn_implementation: str = "sdpa") -> LoadedVLM:
    """Load the pocket VLM; the parts it is built on are fetched first when they are absent.

    Parameters
    ----------
    folder : Path or str, optional
        Where ``pocket-vlm.safetensors`` and ``pocket-vlm.json`` lie. Default: those that came with wqlab.
    dtype : {"float32", "float16", "bfloat16"} or torch.dtype
        Of language model and projector. The encoder, a fiftieth of the weights, stays in float32.
    attn_implementation : str
        Any name that transformers knows, registered ones included.

    Raises
    ------
    MissingPartError
        When the trained part is not there; it says how to get it.
    DamagedFileError
        When a weight file fails its checksum, or the trained part does not fit; it says how to restore it.
    ParameterError
        For another dtype or attention.
    FetchError, OutputError
        As `wqlab.models.fetch.fetch`.
    """
    path = shipped.weights_path(Path(folder).expanduser() if folder is not None else None)
    part = read_adapter(path)  # first: it fails at once, before hundreds of megabytes are read
    projector = projector_of(part)
    base = language.load("smollm2", dtype, attn_implementation)
    try:
        lora.merge(base.model, part.lora, part.meta["scale"])
    except (KeyError, RuntimeError) as error:
        raise DamagedFileError(f"{path} was not trained for SmolLM2-135M ({error}); make it with: {shipped.TRAIN}") from error
    model = assemble(base.model, load_vision(), projector)
    base.tokenizer.chat_template = CHAT_TEMPLATE
    processor = PocketVLMProcessor(
        base.tokenizer,
        num_patches=model.config.num_patches,
        frame_size=model.config.frame_size,
        num_frames=model.config.num_frames,
        context=model.config.text_config.max_position_embeddings,
    )
    encoder = next(member for member in catalog.PARTS["efficientnet_lite0"].members if member.path.endswith(".pth"))
    return LoadedVLM(
        model=model,
        tokenizer=base.tokenizer,
        processor=processor,
        name=shipped.POCKET_VLM,
        note=f"pocket VLM: EfficientNet-Lite0 (ImageNet), projector and LoRA trained by wqlab, merged into {base.note}",
        inputs=[
            *base.inputs,
            Input(f"efficientnet_lite0/{Path(encoder.path).name}", encoder.sha256),
            Input(f"{shipped.POCKET_VLM}/{path.name}", part.sha256),
        ],
    )
