"""What fills the memory: bytes of weights, visual KV cache and text KV cache against video length, and an audit of printed numbers.

All bytes are counted from a model's configuration. GB and MB are powers of ten, GiB and MiB powers of two; the paper does not say
which it means, so the audit shows both.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from wqlab import paths, records
from wqlab.errors import DamagedFileError, MissingPartError, UnknownNameError
from wqlab.experiments import Experiment, Parameters, slider
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value

if TYPE_CHECKING:
    import pandas as pd

#: The model that the paper's introduction names, and the one whose shapes give its number.
NAMED, OTHER = "LLaVA-OneVision-0.5B", "Qwen1.5-0.5B"
#: The paper's example: 30 s at 30 frames/s and 256 tokens per frame; its window.
PAPER_FRAMES, PAPER_TOKENS_PER_FRAME, WINDOW = 900, 256, 32
#: Memory bandwidth of the A800 80 GB in bytes/s (vendor's data sheet, SXM form; the PCIe form has 5 % less).
A800_BANDWIDTH = 2.039e12
_FP16 = 2
_FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
_METADATA = 4  # a scale and a zero-point of two bytes each


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder with grouped-query attention and a gated MLP."""

    name: str
    layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    tokens_per_frame: int | None = None

    def parameters(self) -> int:
        """Return the number of weights in matrices: embeddings, attention and MLP; norms and biases (below 0.1 %) are left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_attention_heads + 2 * self.num_kv_heads)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def kv_values(self) -> int:
        """Return the numbers that one token keeps in the KV cache: K and V of every layer, KV head and channel."""
        return 2 * self.layers * self.num_kv_heads * self.head_dim

    def kv_bytes(self, tokens: float, bits: int = 16) -> float:
        """Return the bytes of the codes of `tokens` tokens."""
        return tokens * self.kv_values() * bits / 8


def shapes() -> dict[str, Shape]:
    """Return the shapes of ``data/paper/vlm_configs.csv`` by name."""
    import csv

    with _configs().open(encoding="utf-8", newline="") as file:
        return {row["name"]: _shape_of_row(row) for row in csv.DictReader(file)}


def shape_of(model: str) -> Shape:
    """Return the shape of `model`: a name of `shapes`, or a folder that holds the ``config.json`` of a checkpoint.

    Raises
    ------
    UnknownNameError
        For a name that is neither.
    MissingPartError
        For a name on a hub, whose configuration is not here.
    DamagedFileError
        For a ``config.json`` without the fields of a decoder.
    """
    known = shapes()
    if model in known:
        return known[model]
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return _shape_of_folder(folder)
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        raise MissingPartError(
            f"model {model!r} is on a hub: download its config.json into a folder and give the folder; "
            f"known without that: {', '.join(sorted(known))}"
        )
    raise UnknownNameError("model", model, known)


def metadata_bytes(shape: Shape, tokens: int, granularity: str, window: int = WINDOW) -> float:
    """Return the bytes of scales and zero-points of `tokens` cached tokens; the remainder below one window has none."""
    groups = {
        "window_channel": tokens // window * shape.kv_values(),
        "window_head": tokens // window * 2 * shape.layers * shape.num_kv_heads,
        "window": tokens // window * 2 * shape.layers,
        "tensor": 2 * shape.layers,
    }
    return float(groups[granularity] * _METADATA)


class KVMemoryParameters(Parameters):
    """Parameters of `KVMemory`. Hold the video, the model and the widths; the audit always uses the paper's setting."""

    model: str = Field(NAMED, description="a name of data/paper/vlm_configs.csv, or a folder with a config.json")
    seconds: float = slider(30.0, 0.5, 60.0, 0.5, "longest video, in seconds", gt=0, le=86_400)
    fps: float = slider(30.0, 1.0, 60.0, 1.0, "frames per second that reach the model", gt=0, le=1_000)
    tokens_per_frame: int | None = Field(
        PAPER_TOKENS_PER_FRAME, ge=1, le=100_000, description="visual tokens per frame; none: the model's own"
    )
    text_tokens: int = slider(99, 0, 4096, 1, "text tokens", ge=0, le=10_000_000)
    bits: Literal[16, 8, 4, 2] = Field(16, description="bits per visual K and V element; text stays at 16")
    metadata: bool = Field(False, description="count a scale and a zero-point per window and channel where bits < 16")
    batch: int = slider(1, 1, 64, 1, "requests at a time", ge=1, le=100_000)


@register("stem", "kv_memory")
class KVMemory(Experiment[KVMemoryParameters]):
    """Bytes against video length for one model, and candidates for the paper's 21.6 GB."""

    stem = "kv_memory"
    title = "What fills the memory of a video-language model"
    paper = "WindowQuant, Fig. 1b and Sect. 1"
    Parameters = KVMemoryParameters

    def run(self, parameters: KVMemoryParameters) -> Result:
        """Count the bytes; see `KVMemoryParameters`."""
        import pandas as pd

        shape = shape_of(parameters.model)
        notes = ["GB is 10^9 bytes, MiB 2^20. Weights are those of the language model in FP16, without the vision encoder."]
        per_frame = parameters.tokens_per_frame or shape.tokens_per_frame
        if per_frame is None:
            per_frame = PAPER_TOKENS_PER_FRAME
            notes.append(f"{shape.name} has no fixed number of tokens per frame; {per_frame} are assumed.")
        data = pd.concat([_over_length(shape, per_frame, parameters), _audit()], ignore_index=True)
        data["mib"] = data["gb"] * 1e9 / 2**20
        counted = Evidence(kind="simulated", source="byte count from the model's configuration")
        printed = Evidence(kind="paper", source="WindowQuant, Sect. 1")
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(mode="json"),
            data=data,
            evidence={"gb": counted, "mib": counted, "paper_gb": printed},
            values=_values(),
            inputs=[Input(name=f"data/paper/{path.name}", sha256=records.sha256_file(path)) for path in (_configs(), _text())],
            notes=notes,
        )


def _over_length(shape: Shape, per_frame: int, parameters: KVMemoryParameters) -> pd.DataFrame:
    """Return weights, visual KV and text KV at 0.5 s, and on a grid up to the longest video."""
    import numpy as np
    import pandas as pd

    grid = np.linspace(parameters.seconds / 60, parameters.seconds, 60)
    rows: list[dict[str, Any]] = []
    for seconds in sorted({min(0.5, parameters.seconds), *(float(s) for s in grid)}):
        frames = math.floor(seconds * parameters.fps + 1e-9)
        tokens = frames * per_frame
        visual = shape.kv_bytes(tokens, parameters.bits)
        if parameters.bits < 16:  # the remainder below one window stays at 16 bits
            rest = tokens % WINDOW
            visual += shape.kv_bytes(rest, 16) - shape.kv_bytes(rest, parameters.bits)
            visual += metadata_bytes(shape, tokens, "window_channel") if parameters.metadata else 0.0
        parts = {
            "weights": shape.parameters() * _FP16,
            "visual KV": visual * parameters.batch,
            "text KV": shape.kv_bytes(parameters.text_tokens) * parameters.batch,
        }
        common = {"part_of": "length", "case": shape.name, "seconds": seconds, "frames": frames, "tokens": tokens}
        rows += [{**common, "part": part, "gb": size / 1e9} for part, size in parts.items()]
    return pd.DataFrame(rows).assign(paper_gb=np.nan)


def _audit() -> pd.DataFrame:
    """Return the visual KV cache of the paper's example for each candidate, with the printed number beside it."""
    import pandas as pd

    tokens = PAPER_FRAMES * PAPER_TOKENS_PER_FRAME
    common = {"part_of": "audit", "seconds": 30.0, "frames": PAPER_FRAMES, "tokens": tokens, "part": "visual KV"}
    cases = {f"{shape.name}": shape for shape in _candidates()}
    rows = [{**common, "case": case, "gb": shape.kv_bytes(tokens) / 1e9, "paper_gb": math.nan} for case, shape in cases.items()]
    return pd.DataFrame([*rows, {**common, "case": "printed in the paper", "gb": math.nan, "paper_gb": _printed_visual_gb()}])


def _candidates() -> list[Shape]:
    known = shapes()
    named = known[NAMED]
    ungrouped = replace(named, name=f"{NAMED} without grouped heads", num_kv_heads=named.num_attention_heads)
    return [named, ungrouped, known[OTHER]]


def _values() -> dict[str, Value]:
    """Return the numbers for the ledger, all in the paper's settings whatever the sliders say."""
    known = shapes()
    named, ungrouped, other = _candidates()
    seven = known["LLaVA-OneVision-7B"]
    tokens, frame = PAPER_FRAMES * PAPER_TOKENS_PER_FRAME, PAPER_TOKENS_PER_FRAME
    table8 = seven.kv_bytes(60 * 5 * frame)
    table10 = 100 * (seven.tokens_per_frame or frame)
    int2 = seven.kv_bytes(100 * frame, 2)
    weights = seven.parameters() * _FP16

    def state(value: float, unit: str) -> Value:
        return Value(float(value), unit, "gb")

    return {
        "named_weights_gb": state(named.parameters() * _FP16 / 1e9, "GB"),
        "named_text_mb": state(named.kv_bytes(99) / 1e6, "MB"),
        "named_tokens_per_frame": state(named.tokens_per_frame or math.nan, "tokens"),
        "named_visual_0_5_s_gb": state(named.kv_bytes(15 * frame) / 1e9, "GB"),
        "named_visual_30_s_gb": state(named.kv_bytes(tokens) / 1e9, "GB"),
        "ungrouped_visual_30_s_gb": state(ungrouped.kv_bytes(tokens) / 1e9, "GB"),
        "other_visual_30_s_gb": state(other.kv_bytes(tokens) / 1e9, "GB"),
        "other_visual_30_s_mib": state(other.kv_bytes(tokens) / 2**20, "MiB"),
        "text_share_of_int2_cache": state(seven.kv_bytes(99) / (seven.kv_bytes(99) + int2), "share"),
        "fig3_frames": state(89 * WINDOW / frame, "frames"),
        "table8_visual_kv_fp16_gb": state(table8 / 1e9, "GB"),
        "table8_largest_saving_gb": state(table8 * (1 - 2 / 16) / 1e9, "GB"),
        "table8_step_roofline_ms": state((weights + table8) / A800_BANDWIDTH * 1e3, "ms"),
        "table10_window_channel_mb": state(metadata_bytes(seven, table10, "window_channel") / 1e6, "MB"),
        "table10_window_head_mb": state(metadata_bytes(seven, table10, "window_head") / 1e6, "MB"),
        "table10_window_mb": state(metadata_bytes(seven, table10, "window") / 1e6, "MB"),
        "table10_tensor_mb": state(metadata_bytes(seven, table10, "tensor") / 1e6, "MB"),
        "table10_metadata_share_of_saving": state(
            metadata_bytes(seven, table10, "window_channel") / (seven.kv_bytes(table10) - seven.kv_bytes(table10, 2)), "share"
        ),
    }


def _printed_visual_gb() -> float:
    import csv

    with _text().open(encoding="utf-8", newline="") as file:
        return next(float(r["value"]) for r in csv.DictReader(file) if (r["row"], r["column"]) == (NAMED, "visual KV"))


def _text() -> Path:
    return paths.shipped("data") / "paper" / "windowquant_text.csv"


def _configs() -> Path:
    return paths.shipped("data") / "paper" / "vlm_configs.csv"


def _shape_of_row(row: dict[str, str]) -> Shape:
    return Shape(
        name=row["name"],
        layers=int(row["layers"]),
        num_attention_heads=int(row["num_attention_heads"]),
        num_kv_heads=int(row["num_kv_heads"]),
        head_dim=int(row["head_dim"]),
        hidden_size=int(row["hidden_size"]),
        intermediate_size=int(row["intermediate_size"]),
        vocab_size=int(row["vocab_size"]),
        tie_word_embeddings=row["tie_word_embeddings"] == "true",
        tokens_per_frame=int(row["tokens_per_frame"]) if row["tokens_per_frame"] else None,
    )


def _shape_of_folder(folder: Path) -> Shape:
    """Read a checkpoint's ``config.json``, whose language model stands flat or under ``text_config`` or ``llm_config``."""
    path = folder / "config.json"
    if not path.is_file():
        raise MissingPartError(f"{folder} has no config.json: download it from where the checkpoint is published")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        text = content.get("text_config") or content.get("llm_config") or content
        lacking = [name for name in _FIELDS if not isinstance(text.get(name), int) or text[name] < 1]
        if lacking:
            raise ValueError(f"it does not state {', '.join(lacking)}; write the values into the file")
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        return Shape(
            name=folder.resolve().name,
            layers=int(text["num_hidden_layers"]),
            num_attention_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            hidden_size=hidden,
            intermediate_size=int(text["intermediate_size"]),
            vocab_size=int(text["vocab_size"]),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", content.get("tie_word_embeddings", False))),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path} is not the configuration of a decoder: {error}") from error
