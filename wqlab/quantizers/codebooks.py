"""Codebooks of a KV cache: what coupled quantization learns of a model once, and the file that keeps it.

`wqlab.hf.kv_codebooks.learn_codebooks` makes them from a model and a text; `learn` here makes those of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from wqlab.errors import DamagedFileError, ParameterError, UnsupportedError
from wqlab.quantizers import Role, artefact, check_finite, kmeans
from wqlab.quantizers.weights import count_entries
from wqlab.types import VQSpec

#: Whether keys are coded as they are before the rotary positions, or behind them. Values have no positions.
Rotary = Literal["before", "after"]
FORMAT = "wqlab-kv-codebooks-v1"
_TENSORS = ("key", "value", "key_counts", "value_counts")
#: Numbers of a distance matrix that are held at once: 256 MB in float32.
_AT_ONCE = 2**26


@dataclass(frozen=True, eq=False)
class KVCodebooks:
    """One codebook per layer, KV head and group of channels, for keys and for values.

    Parameters
    ----------
    key, value : Tensor
        float16 [layers, heads, groups, num_entries, vector_size]; group g couples channels ``g * vector_size ...``.
    key_counts, value_counts : Tensor
        int64 [layers, heads, groups, num_entries]: how many calibration vectors are nearest to each entry; 0 for a dead entry.
    rotary : {"before", "after"}
        Which keys the codebooks are for.
    source : str
        What they were learnt from: model, text, tokens, weighting, seed.

    Raises
    ------
    ParameterError
        When shapes do not fit each other, or another `rotary`.
    NonFiniteError
        When an entry is NaN or infinite.
    """

    key: Tensor
    value: Tensor
    key_counts: Tensor
    value_counts: Tensor
    rotary: Rotary = "after"
    source: str = ""

    def __post_init__(self) -> None:
        if self.rotary not in get_args(Rotary):
            raise ParameterError(f"rotary = {self.rotary!r} is not one of {', '.join(get_args(Rotary))}")
        shapes = {tuple(t.shape) for t in (self.key, self.value)} | {(*t.shape, self.vector_size) for t in self._counts()}
        if len(shapes) != 1 or self.key.dim() != 5:
            found = ", ".join(f"{name} {list(getattr(self, name).shape)}" for name in _TENSORS)
            raise ParameterError(
                f"codebooks: {found} must be [layers, heads, groups, entries, vector_size], counts without the last"
            )
        if self.num_entries > 256:
            raise ParameterError(f"codebooks: {self.num_entries} entries are more than the 256 that an index of 8 bits can name")
        for name in ("key", "value"):
            check_finite(getattr(self, name), f"codebooks: {name}")

    def _counts(self) -> tuple[Tensor, Tensor]:
        return self.key_counts, self.value_counts

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.key.shape[0])

    @property
    def num_entries(self) -> int:
        """Entries of one codebook."""
        return int(self.key.shape[-2])

    @property
    def vector_size(self) -> int:
        """Channels that one index stands for."""
        return int(self.key.shape[-1])

    @property
    def spec(self) -> VQSpec:
        """VQ<vector_size, entries, 1>, a codebook per head and channel group (VQ-LLM, Table III)."""
        return VQSpec(self.vector_size, self.num_entries, 1, f"head x {self.vector_size} channels", "HC")

    def of(self, role: Role, layer_idx: int) -> Tensor:
        """Return the entries [heads, groups, num_entries, vector_size] of one layer.

        Raises
        ------
        ParameterError
            For a layer that has none.
        """
        if layer_idx >= self.num_layers:
            raise ParameterError(
                f"layer {layer_idx} has no codebooks: {self.num_layers} layers were learnt; learn them for this model"
            )
        return (self.value if role == "value" else self.key)[layer_idx]

    def nbytes(self) -> int:
        """Return the bytes of all entries."""
        return self.key.nbytes + self.value.nbytes

    def reordered(self) -> KVCodebooks:
        """Return the same codebooks with the most frequent entry at index 0, the next at 1 (VQ-LLM, Sect. 5.1).

        A pure re-labelling: what is decoded does not change, codes do. Entries that are used alike keep their order.
        """
        sides = {}
        for role, counts in zip(("key", "value"), self._counts(), strict=True):
            order = counts.argsort(dim=-1, descending=True, stable=True)
            entries = getattr(self, role)
            sides[role] = entries.gather(-2, order.unsqueeze(-1).expand_as(entries))
            sides[f"{role}_counts"] = counts.gather(-1, order)
        return replace(self, **sides)

    def save(self, path: Path) -> None:
        """Write one safetensors file, under a temporary name first.

        Raises
        ------
        OutputError
            When it cannot be written.
        """
        about = {"format": FORMAT, "rotary": self.rotary, "source": self.source, "spec": str(self.spec)}
        artefact.write(path, {name: getattr(self, name) for name in _TENSORS}, about)

    @classmethod
    def load(cls, path: Path) -> KVCodebooks:
        """Read what `save` wrote.

        Raises
        ------
        DamagedFileError
            When the file is no such file or not whole; it stays as it is.
        """
        tensors, about = artefact.read(path, FORMAT)
        try:
            return cls(**{name: tensors[name] for name in _TENSORS}, rotary=about["rotary"], source=about["source"])  # type: ignore[arg-type]
        except (KeyError, ValueError) as error:
            raise DamagedFileError(f"{path} holds no whole codebooks ({error}); it was left as it is: learn them again") from error


def split(x: Tensor, vector_size: int) -> Tensor:
    """Return `x` [batch, heads, seq, head_dim] as vectors [heads, groups, batch * seq, vector_size].

    Raises
    ------
    UnsupportedError
        When `head_dim` is no multiple of `vector_size`.
    """
    batch, heads, seq, head_dim = x.shape
    if head_dim % vector_size:
        raise UnsupportedError(
            f"head_dim = {head_dim} is no multiple of vector_size = {vector_size}, so channels cannot be coupled evenly; "
            "take a vector size that divides it"
        )
    grouped = x.reshape(batch, heads, seq, head_dim // vector_size, vector_size)
    return grouped.permute(1, 3, 0, 2, 4).reshape(heads, head_dim // vector_size, batch * seq, vector_size)


def nearest_entries(x: Tensor, entries: Tensor) -> Tensor:
    """Return the code of each vector: uint8 [batch, heads, seq, groups], the index of the nearest entry.

    Distances are compared in float32, from differences, so that large common offsets lose nothing; of equal ones the lowest index
    wins.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim].
    entries : Tensor
        [heads, groups, num_entries, vector_size] with at most 256 entries.
    """
    heads, groups, num_entries, vector_size = entries.shape
    batch, _, seq, _ = x.shape
    vectors = split(x, vector_size).float()
    codes = torch.empty(heads, groups, batch * seq, dtype=torch.uint8, device=x.device)
    known = entries.float().unsqueeze(2)  # [heads, groups, 1, entries, vector_size]
    step = max(_AT_ONCE // (heads * groups * num_entries * vector_size), 1)
    for start in range(0, batch * seq, step):
        apart = vectors[:, :, start : start + step, None] - known
        codes[:, :, start : start + step] = apart.square_().sum(-1).argmin(-1)
    return codes.reshape(heads, groups, batch, seq).permute(2, 0, 3, 1).contiguous()


def look_up(codes: Tensor, entries: Tensor) -> Tensor:
    """Return the entries that `codes` [batch, heads, seq, groups] name, as [batch, heads, seq, groups * vector_size]."""
    heads, groups, num_entries, vector_size = entries.shape
    first = torch.arange(heads * groups, device=codes.device).reshape(1, heads, 1, groups) * num_entries
    return entries.reshape(-1, vector_size)[codes.long() + first].flatten(-2)


def learn(
    x: Tensor, vector_size: int, num_entries: int = 256, weights: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Learn the codebooks of one tensor by k-means from a k-means++ start.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim] of one layer.
    vector_size, num_entries : int
        Of the codebooks.
    weights : Tensor, optional
        Like `x`, not negative: what an error of each element costs, such as squared gradients (diagonal Fisher information). The
        weight of a vector is the sum over its elements. Default: all alike.
    seed : int
        Of the start.

    Returns
    -------
    entries : Tensor
        float16 [heads, groups, num_entries, vector_size]. With fewer different vectors than entries, the rest is never used.
    counts : Tensor
        int64 [heads, groups, num_entries].

    Raises
    ------
    NonFiniteError, UnsupportedError, ParameterError
        As `split` and `wqlab.quantizers.kmeans.learn`.
    """
    check_finite(x, "calibration")
    points = split(x, vector_size).float()
    heads, groups, number, _ = points.shape
    each = None
    if weights is not None:
        check_finite(weights, "calibration: weights")
        each = split(weights, vector_size).float().sum(-1).reshape(heads * groups, number)
    found = kmeans.learn(points.reshape(heads * groups, number, vector_size), num_entries, each, seed=seed)
    limit = torch.finfo(torch.float16).max
    entries = found.entries.reshape(heads, groups, num_entries, vector_size).clamp(-limit, limit).half()
    codes = nearest_entries(x, entries)
    books = codes.permute(1, 3, 0, 2).reshape(heads * groups, -1).long()
    return entries, count_entries(books, num_entries).reshape(heads, groups, num_entries)
