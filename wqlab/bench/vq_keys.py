"""What rotary positions do to coupled quantization: keys of videos, coded before their positions, behind them, behind M-RoPE's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wqlab import progress
from wqlab.bench import Bench
from wqlab.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd
    from torch import Tensor

#: Videos of the development stream whose keys teach, and of another stream whose keys are judged.
LEARN_SEED, JUDGE_SEED = 0, 11
#: Shares of time, height and width of a head's frequencies, as Qwen2-VL divides them.
_SECTIONS = (16, 24, 24)
_SIDE = 8  # patches of a frame


@register("bench", "vq_keys")
class VQKeysBench(Bench):
    """Writes what `vq_quality` says of rotary positions."""

    name = "vq_keys"
    description = "error of CQ and of round to nearest on real keys before RoPE, behind it, behind M-RoPE, and on values"
    columns = {  # noqa: RUF012
        "tensor": "key or value",
        "keys": "before: as projected; after: behind RoPE; mrope: turned by positions in time, height and width instead",
        "method": "cq, or rtn per window of 32 tokens and channel (one bit per element more at 2 and 4 bits, for its scales)",
        "num_bits": "per element, codes alone",
        "layer": "of the pocket VLM's language model",
        "error": "squared error over squared length of the held-out tensor, 1; turning keys changes no length",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per tensor, kind of keys, method, width and layer."""
        import pandas as pd

        from wqlab.evals.scoring import find_device
        from wqlab.models import pocket

        device = find_device()
        loaded = pocket.load(dtype="bfloat16" if device.type == "cuda" else "float32")
        loaded.model.to(device)
        videos, frames = (1, 8) if quick else (4, 32) if device.type == "cuda" else (2, 16)
        learn, judge = (_samples(loaded, seed, videos, frames) for seed in (LEARN_SEED, JUDGE_SEED))
        layers = range(0, len(learn), len(learn) - 1 if quick else 1)
        rows: list[tuple[Any, ...]] = []
        for done, layer in enumerate(layers):
            progress.report("layers", done, len(layers))
            rows += _layer_rows(layer, learn[layer], judge[layer])
        return pd.DataFrame(rows, columns=list(self.columns))


def _samples(loaded: Any, seed: int, videos: int, frames: int) -> Sequence[dict[str, Tensor]]:
    """Return, per layer, the video tokens' keys of each kind and their values, float32 [videos, heads, tokens, head_dim]."""
    from wqlab.evals import pocketbench
    from wqlab.hf.kv_codebooks import sample_kv
    from wqlab.hf.rotary import rotate, watch_rotary
    from wqlab.models.pocket import prompt

    model = loaded.model
    embed = model.get_input_embeddings()
    device = embed.weight.device
    items = list(pocketbench.items("hard", seed, frames, stop=videos))
    with torch.no_grad():
        video = model.get_video_features(pocketbench.draw(items, device)).to(embed.weight.dtype)
        opening = embed(torch.tensor([prompt.prefix_ids(loaded.tokenizer)] * videos, device=device))
        samples = sample_kv(model, "before", inputs_embeds=torch.cat([opening, video], dim=1))
        start = opening.shape[1]
        positions = torch.arange(start, start + video.shape[1], device=device, dtype=torch.int32).expand(videos, -1).contiguous()
        cos, sin = watch_rotary(model).angles(positions, torch.float32)
        three = mrope_angles(cos, sin, frames, start, model)
        found = []
        for layer in samples:
            key, value = (t[:, :, start:].float() for t in (layer.key, layer.value))
            found.append({"before": key, "after": rotate(key, cos, sin), "mrope": rotate(key, *three), "value": value})
    return found


def mrope_angles(cos: Tensor, sin: Tensor, frames: int, start: int, model: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin [batch, 1, seq, head_dim] where each frequency follows time, height or width (Qwen2-VL's M-RoPE).

    The first share of the frequencies turns with the frame, the next with the row of the patch, the last with its column; all
    three count from the position of the first visual token.
    """
    from wqlab.hf.rotary import watch_rotary

    batch, half = cos.shape[0], cos.shape[-1] // 2
    time = torch.arange(frames).repeat_interleave(_SIDE * _SIDE)
    height = torch.arange(_SIDE).repeat_interleave(_SIDE).repeat(frames)
    width = torch.arange(_SIDE).repeat(_SIDE * frames)
    sizes = [half * share // sum(_SECTIONS) for share in _SECTIONS]
    sizes[-1] = half - sum(sizes[:-1])
    angles = []
    for axis in (time, height, width):
        positions = (start + axis).to(torch.int32).to(cos.device).expand(batch, -1).contiguous()
        angles.append(watch_rotary(model).angles(positions, torch.float32))
    mixed = []
    for kind in (0, 1):
        parts = [torch.split(angle[kind][..., :half], sizes, dim=-1)[axis] for axis, angle in enumerate(angles)]
        mixed.append(torch.cat([*parts, *parts], dim=-1))
    return mixed[0], mixed[1]


def _layer_rows(layer: int, learn: dict[str, Tensor], judge: dict[str, Tensor]) -> Iterator[tuple[Any, ...]]:
    from wqlab import quantizers
    from wqlab.quantizers import codebooks
    from wqlab.quantizers.codebooks import look_up, nearest_entries
    from wqlab.quantizers.cq import VECTOR_SIZES

    for kind, x in judge.items():
        tensor, keys = ("value", "") if kind == "value" else ("key", kind)
        for bits, size in VECTOR_SIZES.items():
            entries, _ = codebooks.learn(learn[kind], size)
            yield tensor, keys, "cq", bits, layer, _error(x, look_up(nearest_entries(x, entries), entries))
            rtn = quantizers.create("rtn", bits)
            yield tensor, keys, "rtn", bits, layer, _error(x, rtn.dequantize(rtn.quantize(x)))


def _error(x: Tensor, decoded: Tensor) -> float:
    return float((decoded.double() - x.double()).square().sum() / x.double().square().sum())
