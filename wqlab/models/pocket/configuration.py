"""What a pocket VLM is made of, as transformers keeps it in ``config.json``."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from wqlab.models.pocket.vision import FRAME_SIZE, NUM_PATCHES


class PocketVLMConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes of a pocket VLM. The encoder has only one size, so nothing about it can be set.

    Parameters
    ----------
    text_config : LlamaConfig or dict, optional
        The language model; its ``max_position_embeddings`` is the limit of visual and text tokens together.
    video_token_id : int
        The token that stands where a visual token goes. 4 is ``<reponame>`` in SmolLM2's vocabulary: a marker for source code
        that the chat format never uses, and the unused twin of ``<repo_name>``.
    frame_size : int
        Side of the frames, in pixels.
    num_patches : int
        Visual tokens per frame.
    num_frames : int
        Frames that the processor takes of a video when it is not told.
    projector_hidden_size : int
        Width of the projector's hidden layer.
    projector_gain : float
        First value of the weight of the projector's last LayerNorm.
    tie_word_embeddings : bool
        Whether the output matrix is the embedding.
    """

    model_type = "pocket_vlm"
    sub_configs = {"text_config": LlamaConfig}  # noqa: RUF012  transformers names it, as a plain class attribute

    # transformers makes a dataclass of these, and its checks want `Any` where a class or a dict may come.
    text_config: Any = None
    video_token_id: int = 4
    frame_size: int = FRAME_SIZE
    num_patches: int = NUM_PATCHES
    num_frames: int = 32
    projector_hidden_size: int = 1152
    projector_gain: float = 0.136
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Make a LlamaConfig of what was given as ``text_config``."""
        if self.text_config is None:
            self.text_config = LlamaConfig()
        elif isinstance(self.text_config, dict):
            self.text_config = LlamaConfig(**self.text_config)
        super().__post_init__(**kwargs)
