"""Thresholds and tokens per bit width against alpha (WindowQuant, Eq. 10 and 11, Fig. 13b and 14)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from wqlab.experiments import Experiment, Parameters, slider
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value
from wqlab.windows.plan import assign_bit_widths
from wqlab.windows.thresholds import thresholds

if TYPE_CHECKING:
    from wqlab.records import Record

_WIDTHS = (16, 4, 2)


class AlphaSweepParameters(Parameters):
    """Parameters of `alpha_sweep`.

    Parameters
    ----------
    alpha : float
        Width of the INT4 band, > 0; the paper uses 2.
    normalize : {"none", "minmax", "rank"}
        How mean cosines are brought to the thresholds' range (0, 1). The paper does not say: ``none`` is the literal reading.
    similarity : {"prose", "uniform"}
        ``prose``: recorded similarities of text windows to questions. ``uniform``: evenly spread scores, a simulated yardstick.
    """

    alpha: float = slider(2.0, 0.1, 12.0, 0.1, "width of the INT4 band; the paper uses 2", gt=0, le=700)
    normalize: Literal["none", "minmax", "rank"] = Field("minmax", description="how similarities reach (0, 1)")
    similarity: Literal["prose", "uniform"] = Field("prose", description="where window similarities come from")


@lru_cache(maxsize=1)
def _recorded() -> tuple[Record, Record, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    from wqlab import records

    importance, similarity = records.read("layer_importance", "cpu"), records.read("window_similarity", "cpu")
    scores = similarity.data.pivot_table(index="question", columns="window", values="similarity").to_numpy()
    return importance, similarity, importance.data["s_i_residual"].to_numpy(), scores


@lru_cache(maxsize=8)
def _scores(similarity: str, normalize: str) -> np.ndarray[Any, Any]:
    """Return [num_questions, num_windows] on the thresholds' scale."""
    import torch

    from wqlab.windows.similarity import normalize_scores

    recorded = _recorded()[3]
    if similarity == "uniform":
        # Midpoints of equal bins: an even spread over (0, 1) without a random draw.
        recorded = (np.arange(recorded.shape[1])[None, :] + 0.5) / recorded.shape[1]
    return normalize_scores(torch.tensor(recorded), normalize).numpy()  # type: ignore[arg-type, no-any-return]


def shares(importance: np.ndarray[Any, Any], scores: np.ndarray[Any, Any], alpha: float) -> np.ndarray[Any, Any]:
    """Return the share of windows at 16, 4 and 2 bits, [num_layers, 3], mean over the questions."""
    t_low, t_high = thresholds(importance, alpha)
    widths = np.stack([assign_bit_widths(row, t_low, t_high) for row in scores])
    return np.stack([(widths == bits).mean(axis=(0, 2)) for bits in _WIDTHS], axis=-1)


@lru_cache(maxsize=8)
def _sweep(similarity: str, normalize: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the alphas of the sweep and the mean share of each width over all layers, [num_alphas, 3]."""
    alphas = np.unique(np.concatenate([np.geomspace(0.1, 12, 40), [0.5, 2.0, 8.0]]))
    importance, scores = _recorded()[2], _scores(similarity, normalize)
    return alphas, np.stack([shares(importance, scores, a).mean(0) for a in alphas])


@register("stem", "alpha_sweep")
class AlphaSweep(Experiment[AlphaSweepParameters]):
    """Applies the exact threshold formulas to the recorded calibration of SmolLM2; nothing is run, so a slider follows at once."""

    stem = "alpha_sweep"
    title = "Thresholds and bit widths against alpha"
    paper = "WindowQuant, Eq. 10 and 11, Fig. 13 and 14"
    Parameters = AlphaSweepParameters

    def run(self, parameters: AlphaSweepParameters) -> Result:
        """Compute three parts in one table.

        Returns
        -------
        Result
            ``part == "curve"``: ``s``, ``t_low``, ``t_high``. ``part == "layers"``: ``layer``, ``s_i``, ``bits``, ``tokens``
            (mean over questions). ``part == "sweep"``: ``alpha``, ``bits``, ``share`` of windows, mean over layers and questions.
        """
        import pandas as pd

        importance_record, similarity_record, importance, _ = _recorded()
        window_size = int(similarity_record.data["window_size"].iloc[0])
        scores = _scores(parameters.similarity, parameters.normalize)
        s = np.linspace(0, 1, 101)
        t_low, t_high = thresholds(s, parameters.alpha)
        curve = pd.DataFrame({"part": "curve", "s": s, "t_low": t_low, "t_high": t_high})
        tokens = shares(importance, scores, parameters.alpha) * scores.shape[1] * window_size
        layers = pd.DataFrame(
            [("layers", i, importance[i], bits, tokens[i, k]) for i in range(len(importance)) for k, bits in enumerate(_WIDTHS)],
            columns=["part", "layer", "s_i", "bits", "tokens"],
        )
        alphas, mean_shares = _sweep(parameters.similarity, parameters.normalize)
        sweep = pd.DataFrame(
            [("sweep", a, bits, mean_shares[i, k]) for i, a in enumerate(alphas) for k, bits in enumerate(_WIDTHS)],
            columns=["part", "alpha", "bits", "share"],
        )
        data = pd.concat([curve, layers, sweep], ignore_index=True).astype({"layer": "Int64", "bits": "Int64"})
        formula = Evidence(kind="simulated", source="Eq. 10 and 11")
        s_i = importance_record.evidence()
        if parameters.similarity == "prose":
            counts = similarity_record.evidence()
            notes = ["A proxy: windows of text, not of video; plans follow from recorded s_i and similarities by Eq. 10 and 11."]
        else:
            counts = Evidence(kind="simulated", source="evenly spread similarities under the recorded s_i")
            notes = ["Evenly spread similarities are a yardstick, not data."]
        return Result(
            stem=self.stem,
            parameters=parameters.model_dump(),
            data=data,
            evidence={"t_low": formula, "t_high": formula, "s_i": s_i, "tokens": counts, "share": counts},
            values=self._values(importance),
            inputs=[importance_record.input(), similarity_record.input()],
            notes=[*notes, f"Similarities: normalize={parameters.normalize}. The first window stays at 16 bits."],
        )

    @staticmethod
    def _values(importance: np.ndarray[Any, Any]) -> dict[str, Value]:
        """Return what the ledger judges; the same whatever the figure shows."""
        alphas, mean_shares = _sweep("prose", "minmax")
        int4 = dict(zip(alphas.round(9).tolist(), mean_shares[:, _WIDTHS.index(4)].tolist(), strict=True))
        literal = shares(importance, _scores("prose", "none"), 2.0).mean(0)
        grid = [thresholds(np.linspace(0, 1, 201), a) for a in (0.01, 0.5, 2.0, 8.0, 50.0)]
        return {
            "int4_share_alpha_0_5": Value(int4[0.5], "share", "share"),
            "int4_share_alpha_2": Value(int4[2.0], "share", "share"),
            "int4_share_alpha_8": Value(int4[8.0], "share", "share"),
            "int2_share_alpha_2_literal": Value(float(literal[_WIDTHS.index(2)]), "share", "share"),
            "min_gap_f2_f1": Value(float(min((high - low).min() for low, high in grid)), "1", "t_high"),
        }
