"""Thresholds, tokens per bit width, bits per element and latency against alpha (WindowQuant, Eq. 10 and 11, Fig. 13 and 14)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wqlab.experiments import Experiment, gpu_records, slider, video_prompts
from wqlab.experiments.video_prompts import VideoParameters
from wqlab.models.shipped import POCKET_VLM
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value
from wqlab.windows.plan import assign_bit_widths
from wqlab.windows.thresholds import thresholds

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record

Floats = NDArray[np.float64]

_WIDTHS = (16, 4, 2)
_NORMALIZE = ("none", "minmax", "rank")
_WINDOW = 32
_TIMES = ("latency_us", "p10_us", "p90_us")


class AlphaSweepParameters(VideoParameters):
    """Parameters of `alpha_sweep`; those of the videos are `VideoParameters`.

    Parameters
    ----------
    alpha : float
        Width of the INT4 band, > 0; the paper uses 2.
    normalize : {"none", "minmax", "rank"}
        How mean cosines are brought to the thresholds' range (0, 1). The paper does not say: ``none`` is the literal reading.
    similarity : {"video", "prose", "uniform"}
        ``video``: of PocketBench's videos to their questions, and s_i of the pocket VLM, both measured. ``prose``: recorded
        similarities of text windows to questions, and s_i of SmolLM2. ``uniform``: evenly spread scores under the s_i of SmolLM2, a
        simulated yardstick.
    gpu : str
        Whose record of attention's latency is shown; recorded are the plans of ``video`` and ``prose`` at their defaults.
    """

    alpha: float = slider(2.0, 0.1, 12.0, 0.1, "width of the INT4 band; the paper uses 2", gt=0, le=700)
    normalize: Literal["none", "minmax", "rank"] = Field("minmax", description="how similarities reach (0, 1)")
    similarity: Literal["video", "prose", "uniform"] = Field("video", description="where window similarities come from")
    video: Literal["hard", "easy"] = Field("hard", description="PocketBench split that the pocket VLM watches")
    gpu: str = Field("h200", description="whose record of latency against alpha")

    def source(self) -> tuple[Any, ...]:
        """Return what decides s_i and similarities."""
        return ("video", *self.watched()) if self.similarity == "video" else (self.similarity,)


class Seen(NamedTuple):
    """What the pocket VLM says of some videos: s_i [layers], and cosines [videos, windows] to each one's question."""

    importance: Floats
    scores: Floats
    note: str
    inputs: tuple[Input, ...]


@lru_cache(maxsize=1)
def _recorded() -> tuple[Record, Record, Floats, Floats]:
    from wqlab import records

    importance, similarity = records.read("layer_importance", "cpu"), records.read("window_similarity", "cpu")
    scores = similarity.data.pivot_table(index="question", columns="window", values="similarity").to_numpy()
    return importance, similarity, importance.data["s_i_residual"].to_numpy(), scores


@lru_cache(maxsize=4)
def _watch(split: str, seed: int, num_frames: int, num_videos: int) -> Seen:
    """Score the videos' windows, and calibrate s_i on the first prompt, once for the model, as `wqlab.windowquant` does."""
    import torch

    from wqlab.evals.threads import polite_threads
    from wqlab.hf.capture import capture_importance
    from wqlab.models import load
    from wqlab.windows import scorers

    loaded, cosine = load(POCKET_VLM), scorers.create("cosine")
    importance: list[float] = []
    scores = []
    with polite_threads(), torch.inference_mode():
        for prompt in video_prompts.prompts(loaded, split, seed, num_frames, num_videos):
            if not importance:
                with capture_importance(loaded.model) as meters:
                    loaded.model.base_model(inputs_embeds=prompt.embeddings, use_cache=False)
                importance = [meter.after_residual.value() for meter in meters]
            visual = prompt.embeddings[:, prompt.start : prompt.stop]
            scores.append(np.asarray(cosine.score(prompt.words, visual, window_size=_WINDOW).values[0], dtype=np.float64))
    return Seen(np.array(importance), np.stack(scores), loaded.note, (*loaded.inputs, video_prompts.generator()))


def _importance(source: tuple[Any, ...]) -> Floats:
    return _watch(*source[1:]).importance if source[0] == "video" else _recorded()[2]


@lru_cache(maxsize=32)
def _scores(source: tuple[Any, ...], normalize: str) -> Floats:
    """Return [num_questions, num_windows] on the thresholds' scale."""
    import torch

    from wqlab.windows.similarity import normalize_scores

    scores = _watch(*source[1:]).scores if source[0] == "video" else _recorded()[3]
    if source[0] == "uniform":
        # Midpoints of equal bins: an even spread over (0, 1) without a random draw.
        scores = (np.arange(scores.shape[1])[None, :] + 0.5) / scores.shape[1]
    return normalize_scores(torch.tensor(scores), normalize).numpy()  # type: ignore[arg-type, no-any-return]


def shares(importance: Floats, scores: Floats, alpha: float) -> Floats:
    """Return the share of windows at 16, 4 and 2 bits, [num_layers, 3], mean over the questions."""
    t_low, t_high = thresholds(importance, alpha)
    widths = np.stack([assign_bit_widths(row, t_low, t_high) for row in scores])
    return np.stack([(widths == bits).mean(axis=(0, 2)) for bits in _WIDTHS], axis=-1)


@lru_cache(maxsize=1)
def _bits_per_element() -> Floats:
    """Return what an element of a window costs at each width, its share of FP16 scale and minimum per channel included."""
    from wqlab import quantizers

    cost = [quantizers.create("rtn", b, _WINDOW, "window_channel", "key").bits_per_element((1, 1, _WINDOW, 64)) for b in (4, 2)]
    return np.array([16.0, *cost])


@lru_cache(maxsize=8)
def _sweep(source: tuple[Any, ...]) -> pd.DataFrame:
    """Return `normalize`, `alpha`, `bits`, `share` (mean over layers and questions), and `bits_per_element` of the whole mix."""
    import pandas as pd

    alphas = np.unique(np.concatenate([np.geomspace(0.1, 12, 40), [0.5, 2.0, 8.0]]))
    importance, tables = _importance(source), []
    for normalize in _NORMALIZE:
        scores = _scores(source, normalize)
        found = np.stack([shares(importance, scores, alpha).mean(0) for alpha in alphas])
        tables.append(
            pd.DataFrame(
                {
                    "normalize": normalize,
                    "alpha": np.repeat(alphas, len(_WIDTHS)),
                    "bits": np.tile(_WIDTHS, len(alphas)),
                    "share": found.ravel(),
                    "bits_per_element": np.repeat(found @ _bits_per_element(), len(_WIDTHS)),
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


@register("stem", "alpha_sweep")
class AlphaSweep(Experiment[AlphaSweepParameters]):
    """Applies the exact threshold formulas to similarities and s_i of a model that was run once; a slider follows at once."""

    stem = "alpha_sweep"
    title = "Thresholds and bit widths against alpha"
    paper = "WindowQuant, Eq. 10 and 11, Fig. 13 and 14"
    Parameters = AlphaSweepParameters

    def parts(self, parameters: AlphaSweepParameters) -> list[str]:
        """Return the pocket VLM's parts and the clips, where it is asked for."""
        return parameters.video_parts() if parameters.similarity == "video" else []

    def run(self, parameters: AlphaSweepParameters) -> Result:
        """Compute five parts in one table.

        Returns
        -------
        Result
            ``part == "curve"``: ``s``, ``t_low``, ``t_high``. ``part == "layers"``: ``layer``, ``s_i``, ``bits``, ``tokens``
            (mean over questions). ``part == "sweep"``: for each ``normalize``, ``alpha`` and ``bits`` the ``share`` of windows,
            mean over layers and questions, and ``bits_per_element`` of the whole mix, metadata included. ``part == "prose"``: the
            same from the recorded calibration of SmolLM2, as ``recorded_share`` and ``recorded_bits_per_element``; values without
            a prefix are of these. ``part == "latency"``, where it was recorded: for each ``similarity``, ``normalize`` and
            ``alpha`` the ``latency_us`` of one layer's attention over the mean mix of the committed figure.
        """
        import pandas as pd

        p, source = parameters, parameters.source()
        importance, scores = _importance(source), _scores(source, p.normalize)
        s = np.linspace(0, 1, 101)
        t_low, t_high = thresholds(s, p.alpha)
        curve = pd.DataFrame({"part": "curve", "s": s, "t_low": t_low, "t_high": t_high})
        tokens = shares(importance, scores, p.alpha) * scores.shape[1] * _WINDOW
        layers = pd.DataFrame(
            [("layers", i, importance[i], bits, tokens[i, k]) for i in range(len(importance)) for k, bits in enumerate(_WIDTHS)],
            columns=["part", "layer", "s_i", "bits", "tokens"],
        )
        recorded = {name: f"recorded_{name}" for name in ("share", "bits_per_element")}
        prose = _sweep(("prose",)).rename(columns=recorded).assign(part="prose")
        latency, timed, said = _latency(p.gpu)
        parts = [curve, layers, _sweep(source).assign(part="sweep"), prose, *([latency] if len(latency) else [])]
        data = pd.concat(parts, ignore_index=True)
        importance_record, similarity_record, *_ = _recorded()
        formula = Evidence(kind="simulated", source="Eq. 10 and 11")
        s_i, recorded_counts = importance_record.evidence(), similarity_record.evidence()
        counts, inputs = recorded_counts, [importance_record.input(), similarity_record.input()]
        inputs += [record.input() for record in timed]
        notes = ["Prose is a proxy: windows of text, s_i of SmolLM2; plans follow from the records by Eq. 10 and 11."]
        if p.similarity == "video":
            seen = _watch(*p.watched())
            s_i = counts = Evidence(
                kind="measured",
                source=f"{video_prompts.describe(*p.watched())}; s_i on the first prompt; plans by Eq. 10 and 11",
                hardware=environment.hardware_line(),
            )
            inputs, notes = [*inputs, *seen.inputs], [*notes, f"{seen.note}."]
        elif p.similarity == "uniform":
            counts = Evidence(kind="simulated", source="evenly spread similarities under the recorded s_i")
            notes.append("Evenly spread similarities are a yardstick, not data.")
        return Result(
            stem=self.stem,
            parameters=p.model_dump(),
            data=data.astype({"layer": "Int64", "bits": "Int64"}),
            evidence={
                **dict.fromkeys(("t_low", "t_high"), formula),
                "s_i": s_i,
                **dict.fromkeys(("tokens", "share", "bits_per_element"), counts),
                **dict.fromkeys(recorded.values(), recorded_counts),
                **{name: record.evidence() for record in timed for name in _TIMES},
            },
            values=_recorded_values() | (_video_values(source) if p.similarity == "video" else {}) | _latency_values(p.gpu),
            inputs=inputs,
            notes=[
                f"Similarities: normalize={p.normalize}. The first window stays at 16 bits. Bits per element count FP16 scale and "
                "minimum per window and channel.",
                *notes,
                said,
            ],
        )


@lru_cache(maxsize=4)
def _latency(gpu: str) -> tuple[pd.DataFrame, list[Record], str]:
    """Return the recorded latencies (an empty table where there are none), the record in a list, and what to say of it."""
    import pandas as pd

    record = gpu_records.find("alpha_latency", gpu)
    columns = ["part", "similarity", "normalize", "alpha", *_TIMES]
    if record is None or record.data["latency_us"].isna().all():
        return pd.DataFrame(columns=columns), [], f"Latency on {gpu} is missing: {gpu_records.how_to_get('alpha_latency', gpu)}."
    found = record.data[record.data["latency_us"].notna()].assign(part="latency")
    first = found.iloc[0]
    said = (
        f"Latency: one layer's attention, batch {first['batch']}, {first['seq_len']:,} tokens, {first['num_heads']} heads over "
        f"{first['num_kv_heads']}, at the mean mix of all layers for the default videos, and of prose."
    )
    return found[columns].reset_index(drop=True), [record], said


def _latency_values(gpu: str) -> dict[str, Value]:
    """Return the recorded latencies of the default plans (videos, minmax): at three alphas, and the slowest over the fastest."""
    table = _latency(gpu)[0]
    rows = table[(table["similarity"] == "video") & (table["normalize"] == "minmax")]
    found: dict[str, tuple[float, str, str]] = {}
    for name, alpha in (("0_5", 0.5), ("2", 2.0), ("8", 8.0)):
        for latency in rows.loc[np.isclose(rows["alpha"].astype(float), alpha), "latency_us"]:
            found[f"latency_us_alpha_{name}"] = (float(latency), "us", "latency_us")
    if len(rows):
        found["latency_slowest_to_fastest"] = (float(rows["latency_us"].max() / rows["latency_us"].min()), "ratio", "latency_us")
    return gpu_records.stated(found)


def _at(table: pd.DataFrame, normalize: str, alpha: float) -> pd.DataFrame:
    """Return the rows of one mix, by bits."""
    return table[(table["normalize"] == normalize) & np.isclose(table["alpha"], alpha)].set_index("bits")


@lru_cache(maxsize=1)
def _recorded_values() -> dict[str, Value]:
    """Return what the ledger judges; the same whatever the figure shows."""
    table = _sweep(("prose",))
    grid = [thresholds(np.linspace(0, 1, 201), a) for a in (0.01, 0.5, 2.0, 8.0, 50.0)]
    return {
        **{
            f"int4_share_alpha_{name}": Value(float(_at(table, "minmax", alpha)["share"][4]), "share", "recorded_share")
            for name, alpha in (("0_5", 0.5), ("2", 2.0), ("8", 8.0))
        },
        "int2_share_alpha_2_literal": Value(float(_at(table, "none", 2.0)["share"][2]), "share", "recorded_share"),
        "min_gap_f2_f1": Value(float(min((high - low).min() for low, high in grid)), "1", "t_high"),
    }


@lru_cache(maxsize=8)
def _video_values(source: tuple[Any, ...]) -> dict[str, Value]:
    """Return the mixes of the pocket VLM; with ``none`` and alpha 2 they are the paper's preset."""
    table, values = _sweep(source), {}
    for normalize in _NORMALIZE:
        for name, alpha in (("0_5", 0.5), ("2", 2.0), ("8", 8.0)):
            mix = _at(table, normalize, alpha)
            for bits, width in ((16, "fp16"), (4, "int4"), (2, "int2")):
                values[f"pocket_vlm_{width}_share_{normalize}_alpha_{name}"] = Value(float(mix["share"][bits]), "share", "share")
            cost = Value(float(mix["bits_per_element"].iloc[0]), "bit", "bits_per_element")
            values[f"pocket_vlm_bits_per_element_{normalize}_alpha_{name}"] = cost
    scores = _scores(source, "none")
    values["pocket_vlm_similarity_min"] = Value(float(scores.min()), "1", "share")
    values["pocket_vlm_similarity_max"] = Value(float(scores.max()), "1", "share")
    values["pocket_vlm_median_s_i"] = Value(float(np.median(_importance(source))), "1", "s_i")
    return values
