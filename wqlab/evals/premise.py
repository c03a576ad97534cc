"""The premise of the window search, that a score finds the windows which answer, against videos where these are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wqlab import registry
from wqlab.evals.relevance import auc, precision_at_k, relevant_windows
from wqlab.evals.scoring import PlanSetting
from wqlab.windows import scorers
from wqlab.windows.scorers.attention import AttentionScorer

if TYPE_CHECKING:
    from wqlab.evals.scoring.batch import VideoBatch

WINDOW = 32
#: What `scorer` says for one layer's attention, and for the mean of all.
LAYER, ALL_LAYERS = "attention of a layer", "attention of all layers"


def audit(batch: VideoBatch, sets: Mapping[str, Sequence[int]] | None = None) -> list[dict[str, Any]]:
    """Score the windows of some videos with every scorer that is registered, and with the attention of every layer.

    Parameters
    ----------
    batch : VideoBatch
        Videos with their questions.
    sets : mapping of str to sequence of int, optional
        Further scorers: the mean attention of these layers, by name.

    Returns
    -------
    list of dict
        Per question and scorer: ``index``, ``task``, ``scorer``, ``layer`` (-1 where it is no single one), ``auc``, ``precision``
        (among the k highest scores, k windows being relevant) and ``base_rate`` (share of relevant windows). Questions that every
        window answers are left out: there is nothing to tell apart.
    """
    attention = window_attention(batch)
    # An attention scorer is its layers' mean, which is here already.
    names = [name for name in registry.names("scorer") if name != "uniform" and scorers.create(name).reads == "embeddings"]
    found = {(name, -1): PlanSetting(scorer=name).scores(batch) for name in names}
    means = {ALL_LAYERS: range(len(attention)), "attention": AttentionScorer().layers, **(sets or {})}
    # The attention scorer's own layers may lie deeper than a small model goes.
    found |= {(name, -1): attention[list(n)].mean(0) for name, n in means.items() if max(n) < len(attention)}
    found |= {(LAYER, layer): values for layer, values in enumerate(attention)}
    rows = []
    for row, (item, question) in enumerate(zip(batch.items, batch.known, strict=True)):
        hit = relevant_windows(question.frames, WINDOW, batch.tokens_per_frame, attention.shape[2])
        if hit.all():
            continue
        said = {"index": item.index, "task": question.task, "base_rate": float(hit.mean())}
        rows += [
            {**said, "scorer": name, "layer": layer, "auc": auc(x[row], hit), "precision": precision_at_k(x[row], hit)}
            for (name, layer), x in found.items()
        ]
    return rows


def window_attention(batch: VideoBatch) -> NDArray[np.float64]:
    """Return float64 [layers, batch, windows]: the weight that the question pays to each window."""
    windows = batch.video.shape[1] // WINDOW
    found = batch.attention()[:, :, : windows * WINDOW].reshape(-1, len(batch.items), windows, WINDOW).sum(3)
    return np.asarray(found.double().cpu())


def best_layers(rows: Iterable[Mapping[str, Any]], count: int = 3, below: int | None = None) -> tuple[int, ...]:
    """Return the layers whose attention has the highest mean AUC, ascending: a calibration of the attention scorer.

    Parameters
    ----------
    rows : iterable of dict
        Of `audit`, on development videos.
    count : int
        How many layers.
    below : int, optional
        Only layers before this one; the search then runs no further than that.
    """
    values: dict[int, list[float]] = {}
    for row in rows:
        if row["scorer"] == LAYER and (below is None or row["layer"] < below):
            values.setdefault(int(row["layer"]), []).append(float(row["auc"]))
    ranked = sorted(values, key=lambda layer: (-np.mean(values[layer]), layer))
    return tuple(sorted(ranked[:count]))
