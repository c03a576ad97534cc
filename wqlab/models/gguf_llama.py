"""A Llama in a GGUF file -> a transformers folder with fp16 safetensors.

The quantized tensors are dequantized with the `gguf` package and written without building a model: transformers' own GGUF loader
gives the same values, takes three times as long, and needs `accelerate`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

#: llama.cpp's names of the tensors of one layer -> transformers' names.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: The output matrix is the embedding (tied), so the file has no third one.
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert(source: Path, target: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write config, tokenizer and fp16 weights of a GGUF file of the Llama architecture as a transformers folder.

    Parameters
    ----------
    source : Path
        The GGUF file. Its output matrix must be tied to the embedding.
    target : Path
        An existing folder.
    progress : callable, optional
        Called with the bytes done and the bytes in all, of the GGUF file's tensors.
    """
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    reader = GGUFReader(source)
    config = LlamaConfig(**_config(reader), architectures=["LlamaForCausalLM"], dtype="float16")
    config.save_pretrained(target)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    tensors, done, total = {}, 0, sum(int(tensor.n_bytes) for tensor in reader.tensors)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = _name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _split_halves(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = _split_halves(values, config.num_key_value_heads)
        tensors[name] = torch.from_numpy(values.copy()).to(torch.float16)
        done += int(tensor.n_bytes)
        if progress:
            progress(done, total)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _config(reader: GGUFReader) -> dict[str, Any]:
    """Return the arguments of LlamaConfig that the file's metadata states."""

    def get(key: str) -> Any:
        return reader.fields[key].contents()

    return {
        "vocab_size": get("llama.vocab_size"),
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": get("llama.attention.head_count"),
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "head_dim": get("llama.rope.dimension_count"),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": get("llama.rope.freq_base"),
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
    }


def _name(name: str) -> str:
    """Return transformers' name of a tensor of llama.cpp."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    return f"{_MODEL[name.removesuffix('.weight')]}.weight"


def _split_halves(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's row order of Q and K, which interleaves the two halves that rotary embeddings pair.

    Parameters
    ----------
    weight : ndarray, shape (num_heads * head_dim, hidden)
        Rows of each head in the order 0, d/2, 1, d/2 + 1, ...
    num_heads : int
        Heads in `weight`.

    Returns
    -------
    ndarray, the same shape
        Rows of each head in the order 0, 1, ..., d - 1.
    """
    rows, hidden = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)
