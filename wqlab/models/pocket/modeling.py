"""The pocket VLM as a transformers model: encoder, projector, Llama; video in, text out.

transformers renamed the argument that carries the KV cache (``past_key_values`` until 5.23, then ``cache``). Here it travels to the
Llama inside among the other keyword arguments, under whichever name the installed release uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from wqlab.errors import ParameterError
from wqlab.models.pocket.configuration import PocketVLMConfig
from wqlab.models.pocket.projector import PocketProjector
from wqlab.models.pocket.vision import EfficientNetLite0, normalise, patch_features

CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
#: Frames that the encoder sees at once; its widest layer takes 6 MB a frame in float32.
_FRAMES_AT_ONCE = 32

F = TypeVar("F", bound=Callable[..., Any])


def _shows_cache(forward: F) -> F:
    """Show the cache in the signature of `forward`, where `generate` and other readers look for it."""
    shown = inspect.signature(forward)
    *others, rest = shown.parameters.values()
    cache = inspect.Parameter(CACHE, inspect.Parameter.KEYWORD_ONLY, default=None)
    forward.__signature__ = shown.replace(parameters=[*others, cache, rest])  # type: ignore[attr-defined]
    return forward


class PocketVLMPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What both classes tell transformers about themselves."""

    config_class = PocketVLMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    input_modalities = ("video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ("LlamaDecoderLayer",)
    _skip_keys_device_placement = (CACHE,)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # Small, and bfloat16 would blur what it sees; float16 and TF32 are what it was trained beside.
    _keep_in_fp32_modules_strict = ("vision_tower",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PocketProjector):
            nn.init.constant_(module.norm.weight, self.config.projector_gain)


class PocketVLMModel(PocketVLMPreTrainedModel):
    """Encoder, projector and decoder, without the output matrix.

    Parameters
    ----------
    config : PocketVLMConfig
    """

    def __init__(self, config: PocketVLMConfig) -> None:
        super().__init__(config)
        # First, because transformers takes a model's dtype from its first parameter.
        self.language_model = LlamaModel(config.text_config)
        self.multi_modal_projector = PocketProjector(
            hidden=config.projector_hidden_size, out=config.text_config.hidden_size, gain=config.projector_gain
        )
        self.vision_tower = EfficientNetLite0()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        embedding: nn.Module = self.language_model.get_input_embeddings()
        return embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.language_model.set_input_embeddings(value)

    def get_video_features(self, pixel_values_videos: Tensor) -> Tensor:
        """Return the embeddings of videos.

        Parameters
        ----------
        pixel_values_videos : Tensor [N, T, 3, 256, 256]
            uint8, or floating and already normalised (`wqlab.models.pocket.vision.normalise`).

        Returns
        -------
        Tensor [N, T * 64, hidden]
            Frame by frame, each frame's places row by row.

        Raises
        ------
        ParameterError
            For another shape.
        """
        size = self.config.frame_size
        if pixel_values_videos.ndim != 5 or tuple(pixel_values_videos.shape[2:]) != (3, size, size):
            raise ParameterError(
                f"pixel_values_videos of shape {tuple(pixel_values_videos.shape)} is refused: it must be "
                f"[videos, frames, 3, {size}, {size}]; PocketVLMProcessor makes it so"
            )
        dtype = self.vision_tower.stem.weight.dtype
        features = []
        for frames in torch.split(pixel_values_videos.flatten(0, 1), _FRAMES_AT_ONCE):
            pixels = frames.to(dtype) if frames.is_floating_point() else normalise(frames, dtype)
            features.append(patch_features(self.vision_tower(pixels.contiguous(memory_format=torch.channels_last))))
        videos, length = pixel_values_videos.shape[0], pixel_values_videos.shape[1] * self.config.num_patches
        seen = torch.cat(features).reshape(videos, length, -1).to(self.multi_modal_projector.inner.weight.dtype)
        embeddings: Tensor = self.multi_modal_projector(seen)
        return embeddings

    def _embed(self, input_ids: Tensor, pixel_values_videos: Tensor | None) -> Tensor:
        """Return the embeddings of a prompt [batch, seq, hidden], visual ones where the placeholders stand."""
        embeddings: Tensor = self.get_input_embeddings()(input_ids)
        if pixel_values_videos is None and input_ids.shape[1] == 1:
            return embeddings  # a step of decoding, where counting would make a GPU wait
        places = input_ids == self.config.video_token_id
        count = int(places.sum())
        visual = 0 if pixel_values_videos is None else pixel_values_videos.shape[:2].numel() * self.config.num_patches
        if count != visual:
            raise ParameterError(
                f"the prompt has {count} places for visual tokens (token {self.config.video_token_id}) and the videos have "
                f"{visual} ({self.config.num_patches} per frame): give the videos that the prompt was made for, and keep that "
                "token out of the question; when the cache holds the video already, pass neither"
            )
        if pixel_values_videos is None:
            return embeddings
        features = self.get_video_features(pixel_values_videos).to(embeddings)
        return embeddings.masked_scatter(places.unsqueeze(-1), features)

    @_shows_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the decoder over a prompt; see `PocketVLMForConditionalGeneration.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ParameterError("give exactly one of input_ids and inputs_embeds")
        if input_ids is not None:
            inputs_embeds = self._embed(input_ids, pixel_values_videos)
        elif pixel_values_videos is not None:
            raise ParameterError("pixel_values_videos needs input_ids, which say where the visual tokens go; inputs_embeds do not")
        return self.language_model(inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


class PocketVLMForConditionalGeneration(PocketVLMPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The pocket VLM with its output matrix, for `generate`.

    Parameters
    ----------
    config : PocketVLMConfig
    """

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PocketVLMConfig) -> None:
        super().__init__(config)
        self.model = PocketVLMModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the output matrix."""
        return self.lm_head

    def get_video_features(self, pixel_values_videos: Tensor) -> Tensor:
        """Return the embeddings of videos; see `PocketVLMModel.get_video_features`."""
        return self.model.get_video_features(pixel_values_videos)

    @_shows_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Run the model over a prompt.

        Parameters
        ----------
        input_ids : int64 Tensor [batch, seq]
            With ``config.video_token_id`` where a visual token goes.
        pixel_values_videos : Tensor [N, T, 3, 256, 256]
            uint8 or normalised; the N videos fill the places of the batch in order. Leave it out when the cache holds them.
        attention_mask, position_ids : Tensor [batch, seq]
            As for a Llama.
        inputs_embeds : Tensor [batch, seq, hidden]
            Instead of `input_ids`, with the visual embeddings already in place.
        labels : int64 Tensor [batch, seq]
            Tokens to predict, -100 where there is nothing to learn.
        logits_to_keep : int or Tensor
            Logits of the last so many positions (0: all), or of these positions.
        **kwargs
            For the Llama: the cache, ``use_cache``, ``output_hidden_states``, ``output_attentions``.

        Returns
        -------
        CausalLMOutputWithPast

        Raises
        ------
        ParameterError
            When places and visual tokens differ in number, or the pixels have another shape.
        """
        kwargs.pop("return_dict", None)
        outputs = self.model(
            input_ids=input_ids,
            pixel_values_videos=pixel_values_videos,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )
