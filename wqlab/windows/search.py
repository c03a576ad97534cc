"""The whole window search: embeddings in, plan out (WindowQuant, Sect. 3.2)."""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import ArrayLike
from torch import Tensor

from wqlab.types import WindowPlan
from wqlab.windows import scorers
from wqlab.windows.batch import Rows
from wqlab.windows.plan import make_plan
from wqlab.windows.similarity import Normalize


def search(
    text: Rows,
    visual: Rows,
    importance: Tensor | ArrayLike,
    *,
    scorer: str | scorers.Scorer = "cosine",
    alpha: float = 2.0,
    normalize: Normalize = "none",
    first_window_full: bool = True,
    preset: Literal["paper"] | None = None,
    num_layers: int | None = None,
    check: bool = True,
    **windowing: Any,
) -> WindowPlan:
    """Score the windows and plan their bit widths.

    Parameters
    ----------
    text, visual : Tensor or list of Tensor
        See `wqlab.windows.scorers.Scorer.score`.
    importance, alpha, normalize, first_window_full, preset, num_layers
        See `wqlab.windows.plan.make_plan`.
    scorer : str or Scorer
        A registered name, or a scorer with options of its own.
    check : bool
        False never waits for a CUDA device; `wqlab.windows.plan.on_host` then fetches the plan and checks it.
    **windowing
        ``window_size``, ``window_unit``, ``tokens_per_frame``, ``text_lengths``, ``visual_lengths``, ``dtype`` of
        `wqlab.windows.scorers.Scorer.score`.

    Raises
    ------
    UnknownNameError
        For an unknown scorer.
    ParameterError, NonFiniteError
        See both functions.
    """
    chosen = scorers.create(scorer) if isinstance(scorer, str) else scorer
    scores = chosen.score(text, visual, check=check, **windowing)
    return make_plan(
        scores, importance, alpha, normalize,
        first_window_full=first_window_full, preset=preset, num_layers=num_layers, check=check,
    )  # fmt: skip
