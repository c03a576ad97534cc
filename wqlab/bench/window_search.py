"""How long the window search takes: Eq. 8 in closed form against all pairs through BLAS, the other measures, and the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wqlab.bench import Bench
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

#: 6,400 visual tokens are 100 frames of 64, or 25 of 256; the width is SmolLM2's.
_VISUAL, _TEXT, _WIDTH, _LAYERS, _WINDOW = 6400, 32, 576, 30, 32


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
    description = "window search: closed form against pairwise BLAS, Pearson, Euclidean, and the plan of 30 layers (latency)"
    columns = {  # noqa: RUF012
        "device": "cpu or cuda; the tensors lie there from the start",
        "dtype": "of the embeddings and of the computation",
        "case": "cosine_closed_form, cosine_pairwise_blas, pearson, euclidean: scores of all windows; plan: widths from given "
        "scores; plan_numpy: the same, scores in numpy; search_and_plan: embeddings to widths by cosine, without the check that "
        "waits",
        "num_visual": "visual tokens, in windows of 32",
        "num_text": "text tokens",
        "hidden": "width of the embeddings",
        "num_layers": "layers of the plan; empty where there is none",
        "num_threads": "threads of torch on the CPU",
        "repeats": "timed calls, the cases in turn",
        "median_us": "median wall time until the device has finished, us",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "waits_for_device": "whether the host waits for CUDA inside the call, as torch's sync check sees it; empty on a CPU",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per device, dtype and case."""
        import numpy as np
        import pandas as pd
        import torch

        repeats = 3 if quick else 100
        rows = []
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            for dtype in (torch.float32, torch.float64):
                cases = self._cases(device, dtype)
                on_gpu = device == "cuda"
                times = latencies_us(cases, repeats, torch.cuda.synchronize if on_gpu else lambda: None)
                name, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
                for case, found in times.items():
                    p10, median, p90 = np.percentile(found, [10, 50, 90])
                    layers = _LAYERS if "plan" in case else None
                    waits = waits_for_device(cases[case]) if on_gpu else None
                    sizes = (_VISUAL, _TEXT, _WIDTH, layers, threads, repeats)
                    rows.append((device, name, case, *sizes, median, p10, p90, waits))
        data = pd.DataFrame(rows, columns=list(self.columns))
        return data.astype({"num_layers": "Int64", "waits_for_device": "boolean"})

    @staticmethod
    def _cases(device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
        import numpy as np
        import torch

        from wqlab.windows import similarity
        from wqlab.windows.batch import window_batch
        from wqlab.windows.plan import make_plan
        from wqlab.windows.search import search

        generator = torch.Generator().manual_seed(0)
        text = torch.randn(_TEXT, _WIDTH, generator=generator).to(device, dtype)
        visual = torch.randn(_VISUAL, _WIDTH, generator=generator).to(device, dtype)
        importance = np.linspace(0.5, 0.95, _LAYERS)
        batch = window_batch(text, visual, window_size=_WINDOW, dtype=dtype)
        scores = similarity.cosine(batch.text, batch.windows)
        scores_numpy = scores.cpu().numpy()
        return {
            "cosine_closed_form": lambda: similarity.cosine(batch.text, batch.windows),
            "cosine_pairwise_blas": lambda: pairwise_blas(batch.text, batch.windows),
            "pearson": lambda: similarity.pearson(batch.text, batch.windows),
            "euclidean": lambda: similarity.euclidean(batch.text, batch.windows),
            "plan": lambda: make_plan(scores, importance, normalize="minmax", check=False),
            "plan_numpy": lambda: make_plan(scores_numpy, importance, normalize="minmax"),
            "search_and_plan": lambda: search(text, visual, importance, normalize="minmax", dtype=dtype, check=False),
        }
