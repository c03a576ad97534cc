"""WindowQuant as a setting: every video held after the plan that its own question asks for, and the plan's ablations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from wqlab.errors import ParameterError
from wqlab.evals.relevance import relevant_windows
from wqlab.evals.scoring.batch import VideoBatch
from wqlab.evals.scoring.settings import CacheSetting
from wqlab.hf.row_plans import RowPlansCache
from wqlab.types import Granularity, WindowPlan
from wqlab.windows import scorers
from wqlab.windows.plan import make_plan
from wqlab.windows.scorers.attention import AttentionScorer
from wqlab.windows.similarity import Normalize
from wqlab.windows.thresholds import check_alpha

Order = Literal["plan", "permuted", "truth", "inverse"]


@dataclass(frozen=True)
class PlanSetting(CacheSetting):
    """A plan per video (WindowQuant, Sect. 3.2), of the question that the protocol lets it know.

    Parameters
    ----------
    scorer : str
        A registered scorer.
    alpha : float
        Of Eq. 10 and 11.
    normalize : {"none", "minmax", "rank"}
        How scores reach the thresholds' range. With ``rank`` all scorers and orders hold the same bytes, up to the first window.
    first_window_full : bool
        The paper's module I.
    order : {"plan", "permuted", "truth", "inverse"}
        ``plan``: as the scorer says. ``permuted``: its widths, shuffled over the windows, which keeps the memory. ``truth``: the
        windows that hold the answer score above all others, the best that a scorer could do; ``inverse``: below all others, the
        worst. Inside both groups the order is random.
    seed : int
        Of what is random, together with the index of the question.
    layers : tuple of int, optional
        Of the scorer ``attention``; default: its own.
    method, granularity, window_size
        How a window is encoded.

    Raises
    ------
    UnknownNameError, ParameterError
        For a setting that cannot be.
    """

    scorer: str = "cosine"
    alpha: float = 2.0
    normalize: Normalize = "none"
    first_window_full: bool = True
    order: Order = "plan"
    seed: int = 0
    layers: tuple[int, ...] | None = None
    method: str = "rtn"
    granularity: Granularity = "window_channel"
    window_size: int = 32

    def __post_init__(self) -> None:
        self._scorer()  # refuses what it does not know
        check_alpha(self.alpha)
        for name, known in (("normalize", get_args(Normalize)), ("order", get_args(Order))):
            if getattr(self, name) not in known:
                raise ParameterError(f"{name} = {getattr(self, name)!r} is refused: it must be one of {', '.join(known)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ParameterError(f"seed = {self.seed!r} is not a whole number, 0 or more")
        widths = torch.full((1, 1, 1), 4)
        RowPlansCache(widths, 0, self.window_size, self.method, self.granularity)  # refuses now what it would refuse later

    @property
    def label(self) -> str:
        """For example ``"windowquant cosine rank alpha 2"``."""
        layers = "" if self.layers is None else f"({','.join(map(str, self.layers))})"
        words = ["windowquant", self.scorer + layers, self.normalize, f"alpha {self.alpha:g}"]
        if self.order != "plan":
            words.append(f"{self.order} {self.seed}")
        words += [] if self.first_window_full else ["no first window"]
        usual = PlanSetting()
        words += [str(getattr(self, n)) for n in ("method", "granularity", "window_size") if getattr(self, n) != getattr(usual, n)]
        return " ".join(words)

    def plans(self, batch: VideoBatch) -> list[WindowPlan]:
        """Return each row's plan."""
        values = self.scores(batch)
        found = [
            make_plan(row, batch.facts.importance, self.alpha, self.normalize, first_window_full=self.first_window_full)
            for row in values
        ]
        if self.order == "permuted":
            found = [plan.permuted(self._seed(batch, row)) for row, plan in enumerate(found)]
        return found

    def scores(self, batch: VideoBatch) -> NDArray[np.float64]:
        """Return float64 [batch, windows]; for ``truth`` and ``inverse`` what the answer's frames say."""
        if self.order in ("plan", "permuted"):
            scorer = self._scorer()
            text, visual = list(batch.words), batch.video
            if isinstance(scorer, AttentionScorer):
                visual = batch.attention()[list(scorer.layers)].permute(1, 2, 0)
                text = [visual.new_ones(1, len(scorer.layers))] * len(visual)
            found = scorer.score(text, visual, window_size=self.window_size)
            return np.asarray(torch.as_tensor(found.values).double().cpu())
        count = batch.video.shape[1] // self.window_size
        rows = []
        for row, question in enumerate(batch.known):
            hit = relevant_windows(question.frames, self.window_size, batch.tokens_per_frame, count)
            noise = np.random.default_rng(self._seed(batch, row)).random(count)
            rows.append(noise + (hit if self.order == "truth" else ~hit))
        return np.stack(rows)

    def cache(self, batch: VideoBatch) -> Any:
        """Return a `RowPlansCache` with the plans of these videos."""
        widths = torch.stack([torch.as_tensor(plan.bit_widths) for plan in self.plans(batch)])
        return RowPlansCache(widths, batch.start, self.window_size, self.method, self.granularity, batch.storage, batch.shared)

    def _scorer(self) -> scorers.Scorer:
        return scorers.create(self.scorer, **({} if self.layers is None else {"layers": self.layers}))

    def _seed(self, batch: VideoBatch, row: int) -> int:
        """Return a seed that depends on the question and not on its batch."""
        return int(np.random.SeedSequence([self.seed, batch.items[row].index]).generate_state(1)[0])
