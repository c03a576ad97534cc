"""How long the window search takes: Eq. 8 in closed form against all pairs through BLAS, the other measures, the plan, and the same
per token.

The search per token is made as fast as torch allows: one product with the pooled prompt (or one matrix product with all of its
tokens and a maximum), limits computed once for all requests, and one sort of the scores for all layers, because every layer cuts
the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from wqlab.bench import Bench, Headline
from wqlab.profile.timing import launch_times
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

_log = logging.getLogger(__name__)

#: 6,400 visual tokens are 100 frames of 64, or 25 of 256; the width is SmolLM2's.
_VISUAL, _TEXT, _WIDTH, _LAYERS, _WINDOW = 6400, 32, 576, 30, 32
#: 100 frames of 256 tokens in LLaVA-OneVision-7B: visual tokens, width, layers. Only on a GPU, only searches with their plans.
_LARGE = (25600, 3584, 28)
_SEARCHES = (
    "search_and_plan", "token_search_and_plan", "token_search_and_plan_max", "search_plan_and_order", "token_search_plan_and_order",
)  # fmt: skip


def pairwise_blas(text: Tensor, windows: Tensor) -> Tensor:
    """Return Eq. 8 as a program would compute it from its definition: one matrix product over all pairs, divided by all norms.

    Parameters
    ----------
    text, windows : Tensor
        [1, N, D] and [1, windows, S, D].

    Returns
    -------
    Tensor
        [1, windows].
    """
    import torch

    unit = text[0] / torch.linalg.vector_norm(text[0], dim=-1, keepdim=True)
    tokens = windows[0].flatten(0, 1)
    cosines: Tensor = (tokens @ unit.T) / torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    return cosines.reshape(1, windows.shape[1], -1).mean(-1)


def token_scores(text: Tensor, visual: Tensor, pool: Literal["mean", "max"]) -> Tensor:
    """Return the similarity of every visual token to the prompt.

    Parameters
    ----------
    text, visual : Tensor
        [N, D] and [M, D].
    pool : {"mean", "max"}
        Over the prompt's tokens: their mean cosine, which is one product with the mean of unit vectors, or the largest.

    Returns
    -------
    Tensor
        [M].
    """
    import torch

    unit = text / torch.linalg.vector_norm(text, dim=-1, keepdim=True)
    dots: Tensor = visual @ unit.mean(0) if pool == "mean" else (visual @ unit.T).amax(-1)
    cosines: Tensor = dots / torch.linalg.vector_norm(visual, dim=-1)
    return cosines


def token_plan(scores: Tensor, limits: Tensor) -> Tensor:
    """Return how many limits every token reaches in every layer, as uint8 [layers, M]: 0, 1 and 2 are 2, 4 and 16 bits.

    Parameters
    ----------
    scores : Tensor
        [M]; normalized to [0, 1] here, as `make_plan` does with ``minmax``.
    limits : Tensor
        [2, layers, 1], ascending: what 4 bits and 16 bits need.
    """
    low, high = scores.aminmax()
    scaled = (scores - low) / (high - low)
    return (scaled >= limits[0]).byte().add_(scaled > limits[1])


def token_order(scores: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens from the least similar to the most, [M], and where 4 and 16 bits begin in every layer, [2, layers].

    All layers cut the same order, so that one sort serves them all and no width of a token is needed.
    """
    import torch

    low, high = scores.aminmax()
    ordered, order = scores.sort()
    return order, torch.searchsorted((ordered - low) / (high - low), limits.squeeze(-1))


def latencies_us(cases: dict[str, Callable[[], Any]], repeats: int, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Return wall times in microseconds, `repeats` per case, after three calls that do not count.

    The cases take turns, so that whatever else the machine does meets all of them.

    Parameters
    ----------
    cases : dict of str to callable
        What to time.
    repeats : int
        Rounds.
    wait : callable
        Returns when the device has finished.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-3, repeats):
        for name, call in cases.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if turn >= 0:
                times[name].append((time.perf_counter() - start) * 1e6)
    return times


def waits_for_device(call: Callable[[], Any]) -> bool:
    """Return whether `call`, which must have run before, makes the host wait for CUDA; torch raises where it does."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@register("bench", "window_search")
class WindowSearchBench(Bench):
    """Random embeddings: no case looks at the values. Norms count in the closed form and in the pairwise one alike."""

    name = "window_search"
    description = "window search: closed form against pairwise BLAS, Pearson, Euclidean, the plan, and the same per token (latency)"
    columns = {  # noqa: RUF012
        "device": "cpu or cuda; the tensors lie there from the start",
        "dtype": "of the embeddings and of the computation",
        "case": "cosine_closed_form, cosine_pairwise_blas, pearson, euclidean: scores of all windows; plan: widths from given "
        "scores; plan_numpy: the same, scores in numpy; search_and_plan: embeddings to widths by cosine, without the check that "
        "waits; token_search_and_plan, ..._max: the same for every token, similarity to the pooled prompt, or to its nearest "
        "token; search_plan_and_order, token_search_plan_and_order: the order by width as well; large_...: at other sizes",
        "num_visual": "visual tokens, in windows of 32",
        "num_text": "text tokens",
        "hidden": "width of the embeddings",
        "num_layers": "layers of the plan; empty where there is none",
        "num_threads": "threads of torch on the CPU",
        "repeats": "timed calls, the cases in turn",
        "median_us": "median wall time until the device has finished, us",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "graph_us": "median of replays in a CUDA graph, importance on the device, the same data each time, us; "
        "empty where it was not recorded",
        "waits_for_device": "whether the host waits for CUDA inside the call, as torch's sync check sees it; empty on a CPU",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per device, dtype and case."""
        import pandas as pd
        import torch

        rows: list[dict[str, Any]] = []
        repeats = 3 if quick else 100
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            for dtype in (torch.float32, torch.float64):
                rows += self._rows(device, dtype, (_VISUAL, _WIDTH, _LAYERS), repeats)
        if torch.cuda.is_available():
            for dtype in (torch.float16, torch.bfloat16):  # what a model computes in
                rows += self._rows("cuda", dtype, (_VISUAL, _WIDTH, _LAYERS), repeats, _SEARCHES)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                rows += self._rows("cuda", dtype, _LARGE, repeats, _SEARCHES, "large_")
        data = pd.DataFrame(rows, columns=list(self.columns))
        return data.astype({"num_layers": "Int64", "waits_for_device": "boolean", "graph_us": float})

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the closed form beside BLAS, and search and plan per window beside the fastest per token, in any dtype."""
        found = []
        for device, part in data.groupby("device", sort=False):
            times = part.groupby("case")["median_us"].min()
            ours, theirs = times["cosine_closed_form"], times["cosine_pairwise_blas"]
            found.append(Headline(f"similarity of all windows on {device}, closed form against BLAS", ours, theirs, "us"))
            for column, how in (("median_us", "launched one by one"), ("graph_us", "in a CUDA graph")):
                for size in ("", "large_"):
                    own, others = (
                        part[part["case"] == size + "search_and_plan"],
                        part[part["case"].str.startswith(size + "token_")],
                    )
                    if column in part and own[column].notna().any():
                        both = [float(x[column].min()) / 1e3 if len(x) else None for x in (own, others)]
                        # The paper's numbers, too, are for 100 frames at batch 1.
                        of, claim = ("100 frames of 256 tokens", "table11-latency") if size else ("6,400 tokens", None)
                        name = f"search and plan for {of} on {device}, {how}, against per token"
                        found.append(Headline(name, both[0], both[1], "ms", claim))
        return found

    def _rows(
        self,
        device: str,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        repeats: int,
        only: tuple[str, ...] = (),
        prefix: str = "",
    ) -> list[dict[str, Any]]:
        import numpy as np
        import torch

        on_gpu = device == "cuda"
        chosen = self._cases(device, dtype, sizes)
        cases = {name: chosen[name] for name in only or chosen}
        times = latencies_us(cases, repeats, torch.cuda.synchronize if on_gpu else lambda: None)
        rows = []
        for case, found in times.items():
            p10, median, p90 = np.percentile(found, [10, 50, 90])
            rows.append(
                {
                    "device": device, "dtype": str(dtype).removeprefix("torch."), "case": prefix + case, "num_visual": sizes[0],
                    "num_text": _TEXT, "hidden": sizes[1], "num_layers": sizes[2] if "plan" in case else None,
                    "num_threads": torch.get_num_threads(), "repeats": repeats, "median_us": median, "p10_us": p10, "p90_us": p90,
                    "waits_for_device": waits_for_device(cases[case]) if on_gpu else None,
                }
            )  # fmt: skip
        if on_gpu:
            recorded = self._cases(device, dtype, sizes, importance_on_device=True)
            for row in rows:
                name = row["case"].removeprefix(prefix)
                if name not in _SEARCHES:
                    continue
                try:
                    row["graph_us"] = launch_times([recorded[name]], torch.device(device), repeats).median_us
                except RuntimeError as error:  # the times of single calls stand without it
                    _log.warning("%s, %s cannot be recorded in a CUDA graph: %s", name, dtype, " ".join(str(error).split()))
        return rows

    @staticmethod
    def _cases(
        device: str, dtype: torch.dtype, sizes: tuple[int, int, int], importance_on_device: bool = False
    ) -> dict[str, Callable[[], Any]]:
        import numpy as np
        import torch

        from wqlab.windows import similarity
        from wqlab.windows.batch import window_batch
        from wqlab.windows.plan import make_plan
        from wqlab.windows.search import search
        from wqlab.windows.thresholds import thresholds

        num_visual, width, layers = sizes
        generator = torch.Generator(device).manual_seed(0)
        text, visual = (torch.randn(n, width, generator=generator, device=device).to(dtype) for n in (_TEXT, num_visual))
        calibrated = np.linspace(0.5, 0.95, layers)
        importance = torch.from_numpy(calibrated).to(device) if importance_on_device else calibrated
        # They depend on layer and alpha alone, so that a search per token need not compute them for each request.
        limits = torch.from_numpy(np.stack(thresholds(calibrated, 2.0)))[..., None].to(device, dtype)
        batch = window_batch(text, visual, window_size=_WINDOW, dtype=dtype)
        scores = similarity.cosine(batch.text, batch.windows)
        scores_numpy = scores.double().cpu().numpy()

        def per_window() -> Any:
            return search(text, visual, importance, normalize="minmax", dtype=dtype, check=False).bit_widths

        return {
            "cosine_closed_form": lambda: similarity.cosine(batch.text, batch.windows),
            "cosine_pairwise_blas": lambda: pairwise_blas(batch.text, batch.windows),
            "pearson": lambda: similarity.pearson(batch.text, batch.windows),
            "euclidean": lambda: similarity.euclidean(batch.text, batch.windows),
            "plan": lambda: make_plan(scores, importance, normalize="minmax", check=False),
            "plan_numpy": lambda: make_plan(scores_numpy, importance, normalize="minmax"),
            "search_and_plan": per_window,
            "token_search_and_plan": lambda: token_plan(token_scores(text, visual, "mean"), limits),
            "token_search_and_plan_max": lambda: token_plan(token_scores(text, visual, "max"), limits),
            "search_plan_and_order": lambda: per_window().argsort(dim=1, stable=True),
            "token_search_plan_and_order": lambda: token_order(token_scores(text, visual, "mean"), limits),
        }
