"""Weight quantizers in the linear layers of a transformers model: what their inputs look like, and the quantized weights in place.

All linear layers of the decoder layers are quantized, which is where the papers quantize: not the embeddings, nor the head, nor a
vision encoder. Statistics are of the model in full precision, in one pass: a layer does not see the error of those before it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wqlab import progress
from wqlab.errors import DamagedFileError, ParameterError, UnsupportedError
from wqlab.hf.capture import decoder_layers
from wqlab.models import manifest
from wqlab.quantizers import artefact
from wqlab.quantizers.weights import (
    PARTS,
    LinearStats,
    QuantizedWeight,
    WeightQuantizer,
    count_entries,
    create_weight_quantizer,
    reorder_by_frequency,
)

log = logging.getLogger(__name__)

FORMAT = "wqlab-weight-v1"


def decoder_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside the decoder layers, by their name in `model`.

    Raises
    ------
    UnsupportedError
        When the model has none.
    """
    inside = {id(m) for layer in decoder_layers(model) for m in layer.modules() if isinstance(m, nn.Linear)}
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside}
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no torch.nn.Linear in its decoder layers; wqlab quantizes these only")
    return found


@torch.no_grad()
def collect_stats(model: nn.Module, passes: Iterable[Mapping[str, Any]]) -> dict[str, LinearStats]:
    """Run the model over `passes` and return what the inputs of each linear layer of its decoder are like.

    Parameters
    ----------
    model : torch.nn.Module
        A transformers model with recognisable decoder layers.
    passes : iterable of mapping
        What the model takes, one mapping a pass: ``[{"input_ids": ids}]``. Without padding.

    Returns
    -------
    dict of str to LinearStats
        By the layer's name in `model`, on the model's device, summed in float32.

    Raises
    ------
    ParameterError
        When no token passed.
    NonFiniteError
        When an input is NaN or infinite.
    """
    linears = decoder_linears(model)
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    tokens: dict[str, int] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1]).float()
            before = sums.get(name)
            here = x.T @ x, x.abs().sum(0)
            sums[name] = here if before is None else (before[0].add_(here[0]), before[1].add_(here[1]))
            tokens[name] = tokens.get(name, 0) + x.shape[0]

        return hook

    handles = [linear.register_forward_pre_hook(listen(name)) for name, linear in linears.items()]
    try:
        for inputs in passes:
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ParameterError("calibration needs one token or more; passes was empty")
    return {name: LinearStats(h / tokens[name], a / tokens[name], tokens[name]) for name, (h, a) in sums.items()}


@torch.no_grad()
def encode_linears(
    model: nn.Module, method: str, stats: Mapping[str, LinearStats], folder: Path | str | None = None, **options: Any
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Encode every linear layer of the decoder, and yield its name and its encoded weight; the model stays as it is.

    Codebooks are sorted by use (`reorder_by_frequency`).

    Parameters
    ----------
    model : torch.nn.Module
        On a CUDA device the method runs there too.
    method : str
        A registered weight quantizer; `options` are its own.
    stats : mapping of str to LinearStats
        From `collect_stats` of this model.
    folder : Path, optional
        Holds one safetensors file per layer with codes, codebooks and entry frequencies. Layers that are there, made by the same
        method and options from the same weight, are read; a damaged file is set aside and the layer encoded again.

    Raises
    ------
    ParameterError
        When a layer has no statistics.
    """
    quantizer = create_weight_quantizer(method, **options)
    linears = decoder_linears(model)
    for done, (name, linear) in enumerate(linears.items()):
        if name not in stats:
            raise ParameterError(f"{name} has no statistics: collect them from this model ({len(stats)} layers have some)")
        weight = linear.weight.detach()
        about = {"method": method, "options": repr(quantizer), "weight": _fingerprint(weight, stats[name])}
        path = None if folder is None else Path(folder) / f"{name}.safetensors"
        encoded = None if path is None else _read(path, about)
        if encoded is None:
            encoded = quantizer.quantize(weight, stats[name].to(weight.device))
            if quantizer.stored_entries:
                encoded = reorder_by_frequency(quantizer, encoded)
            if path is not None:
                save_weight(path, quantizer, encoded, about)
        yield name, encoded.to(weight.device)
        progress.report("linear layers encoded", done + 1, len(linears))


@contextmanager
def quantize_linears(
    model: nn.Module, method: str, stats: Mapping[str, LinearStats], folder: Path | str | None = None, **options: Any
) -> Iterator[dict[str, dict[str, float]]]:
    """Let the decoder compute with decoded weights while the block runs, and give the model its own weights back behind it.

    Parameters are those of `encode_linears`.

    Yields
    ------
    dict of str to dict of str to float
        Layer -> its bits per weight (`QuantizedWeight.bits`) and ``weights``, their number.

    Examples
    --------
    >>> with quantize_linears(model, "aqlm", collect_stats(model, [{"input_ids": text}])) as bits:  # doctest: +SKIP
    ...     perplexity(model, other_text, lambda: QuantizedKVCache("kivi", 2))
    """
    linears, kept, bits = decoder_linears(model), {}, {}
    quantizer = create_weight_quantizer(method, **options)
    try:
        for name, encoded in encode_linears(model, method, stats, folder, **options):
            linear = linears[name]
            kept[name] = linear.weight.data
            linear.weight.data = quantizer.dequantize(encoded).to(linear.weight.dtype)
            bits[name] = {**encoded.bits(), "weights": float(linear.weight.numel())}
        yield bits
    finally:
        for name, weight in kept.items():
            linears[name].weight.data = weight


def mean_bits(bits: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return ``codes``, ``codebooks``, ``scales`` and ``total`` bits per weight over all layers of `quantize_linears`."""
    weights = sum(layer["weights"] for layer in bits.values())
    return {part: sum(layer[part] * layer["weights"] for layer in bits.values()) / weights for part in (*PARTS, "total")}


def save_weight(path: Path, quantizer: WeightQuantizer, encoded: QuantizedWeight, about: Mapping[str, str]) -> None:
    """Write one encoded weight with its entry frequencies; `about` is words to know it by again."""
    tensors = {f"{part}.{name}": t for part in PARTS for name, t in getattr(encoded, part).items()}
    indices = quantizer.entry_indices(encoded)
    if indices is not None:
        tensors["counts"] = count_entries(indices, quantizer.stored_entries)
    shape = {"shape": list(encoded.shape), "dtype": str(encoded.dtype).removeprefix("torch."), "meta": encoded.meta}
    artefact.write(path, tensors, {**about, "format": FORMAT, "encoded": json.dumps(shape)})


def load_weight(path: Path) -> tuple[QuantizedWeight, Tensor | None, dict[str, str]]:
    """Return what `save_weight` wrote: the weight, its entry frequencies [books, entries] and the words.

    Raises
    ------
    FileNotFoundError, DamagedFileError
        As `wqlab.quantizers.artefact.read`.
    """
    tensors, about = artefact.read(path, FORMAT)
    said = json.loads(about["encoded"])
    codes, codebooks, scales = (
        {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")} for part in PARTS
    )
    shape = (said["shape"][0], said["shape"][1])
    weight = QuantizedWeight(about["method"], codes, codebooks, scales, shape, getattr(torch, said["dtype"]), said["meta"])
    return weight, tensors.get("counts"), about


def _read(path: Path, about: Mapping[str, str]) -> QuantizedWeight | None:
    try:
        weight, _, said = load_weight(path)
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        log.warning("%s; it is kept as %s and the layer is encoded again", error, manifest.set_aside(path).name)
        return None
    return weight if all(said[key] == value for key, value in about.items()) else None


def _fingerprint(weight: Tensor, stats: LinearStats) -> str:
    """A few sums that differ for other weights or another calibration; the file's own content has a checksum."""
    w, h = weight.double(), stats.hessian.double()
    return f"{list(weight.shape)} {w.sum():.12g} {w.square().sum():.12g} {h.sum():.12g} {stats.tokens}"
