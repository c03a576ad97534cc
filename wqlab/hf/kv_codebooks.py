"""The codebooks of a model's KV cache, learnt from what its attention reads over a text."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wqlab import progress
from wqlab.errors import DamagedFileError, NonFiniteError, ParameterError
from wqlab.hf.intercept import intercept_attention
from wqlab.hf.rotary import unrotate, watch_rotary
from wqlab.models import manifest
from wqlab.quantizers import artefact, codebooks
from wqlab.quantizers.codebooks import KVCodebooks, Rotary
from wqlab.quantizers.cq import VECTOR_SIZES

log = logging.getLogger(__name__)

_LAYER = "wqlab-kv-codebooks-layer-v1"


@dataclass(frozen=True, eq=False)
class KVSamples:
    """What one layer's attention read over a text.

    Parameters
    ----------
    key, value : Tensor
        [batch, kv_heads, seq, head_dim], in the model's dtype; the key with its rotary positions, or without.
    key_weights, value_weights : Tensor, optional
        Like them, float32: the squared gradient of the text's summed negative log-likelihood, the diagonal of the empirical Fisher
        information. None when it was not asked for.
    """

    key: Tensor
    value: Tensor
    key_weights: Tensor | None = None
    value_weights: Tensor | None = None


def sample_kv(model: Any, rotary: Rotary = "after", fisher: bool = False, **inputs: Any) -> list[KVSamples]:
    """Run the model once over `inputs` and return every layer's keys and values.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or a VLM. Its weights stay as they are.
    rotary : {"before", "after"}
        Keys without or with their rotary positions.
    fisher : bool
        Weigh elements by squared gradients too, which needs ``input_ids`` (each token is predicted from those before it) and the
        memory of a training step.
    **inputs
        What `model` takes: ``input_ids`` or ``inputs_embeds``, without padding.

    Raises
    ------
    ParameterError
        For `fisher` without ``input_ids``.
    UnsupportedError
        As `watch_rotary` and `intercept_attention`.
    NonFiniteError
        When a key, value or gradient is NaN or infinite.
    """
    if fisher and "input_ids" not in inputs:
        raise ParameterError("fisher = True needs input_ids, whose tokens the model predicts; it got " + ", ".join(inputs))
    watch = watch_rotary(model) if rotary == "before" else None
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def note(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if fisher:
            key.retain_grad()
            value.retain_grad()
        found[layer] = (key, value)
        return key, value, mask

    if fisher:
        _with_gradients(model, note, inputs)
    else:
        with torch.no_grad(), intercept_attention(model, note):
            model(**inputs, use_cache=False)
    samples = []
    for layer in sorted(found):
        key, value = found[layer]
        weights = [g.float() for g in (key.grad, value.grad) if g is not None] if fisher else []
        key = key.detach()
        if watch is not None:
            cos, sin = watch.angles(watch.extend(None, key.shape[0], key.shape[2]), key.dtype)
            key = unrotate(key, cos, sin)
            # A rotation's gradient turns back like the key itself, up to the scale that some models put on it.
            weights[:1] = [unrotate(g, cos, sin) * (cos.float().square() + sin.float().square()) for g in weights[:1]]
        weights = [g.square() for g in weights]
        for name, t in zip(("key", "value", "key gradient", "value gradient"), (key, value, *weights), strict=False):
            if not bool(torch.isfinite(t).all()):
                raise NonFiniteError(f"calibration: layer {layer}: {name} is not finite; run the model in bfloat16 or float32")
        samples.append(KVSamples(key, value.detach(), *weights))
    return samples


def _with_gradients(model: Any, note: Any, inputs: dict[str, Any]) -> None:
    wanted = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in wanted:
        p.requires_grad_(False)
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_())
    try:
        with torch.enable_grad(), intercept_attention(model, note):
            logits = model(**inputs, use_cache=False).logits
            ids = inputs["input_ids"]
            torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            ).backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
        for p, before in wanted:
            p.requires_grad_(before)


def learn_codebooks(
    model: Any,
    num_bits: int = 4,
    rotary: Rotary = "before",
    fisher: bool = False,
    num_entries: int = 256,
    seed: int = 0,
    path: Path | str | None = None,
    **inputs: Any,
) -> KVCodebooks:
    """Learn CQ's codebooks for a model from one pass over a text, most frequent entries first.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On a CUDA device the k-means run there too.
    num_bits : {2, 4}
        Bits per element: vectors of 4 or 2 channels.
    rotary : {"before", "after"}
        Keys before their rotary positions, as published, or behind them.
    fisher : bool
        Weigh vectors by squared gradients (`sample_kv`) instead of all alike.
    num_entries : int
        Of each codebook, at most 256. There should be many more tokens than entries.
    seed : int
        Of the k-means++ starts.
    path : Path, optional
        Where the codebooks are kept. When the file is there and was learnt from the same, it is read. While it is being made, each
        finished layer is kept in ``<path>.layers``, and an interrupted run goes on from there. A damaged layer is set aside and
        learnt again.
    **inputs
        As in `sample_kv`.

    Raises
    ------
    ParameterError
        For other bits, or a file at `path` that was learnt from something else.
    DamagedFileError
        When the file at `path` is damaged; it is left as it is.
    UnsupportedError, NonFiniteError
        As `sample_kv` and `wqlab.quantizers.codebooks.learn`.
    """
    if num_bits not in VECTOR_SIZES:
        raise ParameterError(f"num_bits = {num_bits!r} is not one of {', '.join(map(str, sorted(VECTOR_SIZES)))}")
    given = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if given is None:
        raise ParameterError(f"learn_codebooks needs input_ids or inputs_embeds; it got {', '.join(inputs) or 'nothing'}")
    content = hashlib.sha256(given.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]
    weighting = "Fisher-weighted" if fisher else "plain"
    source = (
        f"{type(model).__name__}, {given.shape[0] * given.shape[1]} tokens (sha256 {content}), {num_bits} bits, "
        f"{num_entries} entries, keys {rotary} rotary positions, {weighting}, seed {seed}"
    )
    target = None if path is None else Path(path)
    if target is not None and target.exists():
        kept = KVCodebooks.load(target)
        if kept.source != source:
            raise ParameterError(f"{target} was learnt from something else: {kept.source}; asked for: {source}; name another path")
        return kept
    folder = None if target is None else target.with_name(f"{target.name}.layers")
    samples = sample_kv(model, rotary, fisher, **inputs)
    layers = []
    for index, layer in enumerate(samples):
        layers.append(
            _layer(layer, VECTOR_SIZES[num_bits], num_entries, seed, source, folder and folder / f"{index:03d}.safetensors")
        )
        progress.report("layers' codebooks learnt", index + 1, len(samples))
    key, value, key_counts, value_counts = (
        torch.stack([layer[name].cpu() for layer in layers]) for name in ("key", "value", "key_counts", "value_counts")
    )
    books = KVCodebooks(key, value, key_counts, value_counts, rotary, source).reordered()
    if target is not None and folder is not None:
        books.save(target)
        for part in folder.glob("*.safetensors"):
            part.unlink()
        if not any(folder.iterdir()):  # else a damaged layer lies there, which is not ours to throw away
            folder.rmdir()
    return books


def _layer(samples: KVSamples, vector_size: int, num_entries: int, seed: int, source: str, path: Path | None) -> dict[str, Tensor]:
    """Return one layer's entries and counts, from its file when that is whole and of the same source."""
    if path is not None and path.exists():
        try:
            tensors, about = artefact.read(path, _LAYER)
        except DamagedFileError as error:
            log.warning("%s; it is kept as %s and learnt again", error, manifest.set_aside(path).name)
        else:
            if about["source"] == source:
                return tensors
    found: dict[str, Tensor] = {}
    for role, x, weights in (("key", samples.key, samples.key_weights), ("value", samples.value, samples.value_weights)):
        found[role], found[f"{role}_counts"] = codebooks.learn(x, vector_size, num_entries, weights, seed)
    if path is not None:
        artefact.write(path, found, {"format": _LAYER, "source": source})
    return found
