"""The pocket VLM: EfficientNet-Lite0 sees, SmolLM2-135M speaks, and a small projector trained here joins them.

Importing this package makes transformers' Auto classes know the model type ``pocket_vlm``, so that a saved folder loads with them.
"""

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor

from wqlab.models.pocket.configuration import PocketVLMConfig
from wqlab.models.pocket.loading import LoadedVLM, load
from wqlab.models.pocket.modeling import PocketVLMForConditionalGeneration, PocketVLMModel
from wqlab.models.pocket.processing import PocketVLMProcessor

AutoConfig.register(PocketVLMConfig.model_type, PocketVLMConfig, exist_ok=True)
AutoModel.register(PocketVLMConfig, PocketVLMModel, exist_ok=True)
AutoModelForImageTextToText.register(PocketVLMConfig, PocketVLMForConditionalGeneration, exist_ok=True)
AutoProcessor.register(PocketVLMConfig, PocketVLMProcessor, exist_ok=True)

__all__ = [
    "LoadedVLM",
    "PocketVLMConfig",
    "PocketVLMForConditionalGeneration",
    "PocketVLMModel",
    "PocketVLMProcessor",
    "load",
]
