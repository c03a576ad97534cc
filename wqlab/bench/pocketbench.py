"""PocketBench with the pocket VLM: every question's answer in full precision and with round to nearest, on fresh seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wqlab import paths, progress
from wqlab.bench import Bench
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd

#: A stream that nothing was tuned on. The answers to stream 1000 chose `curriculum.TASK_WEIGHTS`, so it reports no more.
SEED = 1001


class Run(NamedTuple):
    """Questions of one kind; batches hold about as many visual tokens as fit a GPU well."""

    protocol: str
    split: str
    num_frames: int
    limit: int
    blind: bool = False


RUNS = (
    Run("cache_then_ask", "easy", 32, 480),
    Run("cache_then_ask", "hard", 32, 480),
    Run("cache_then_ask", "easy", 100, 240),
    Run("cache_then_ask", "easy", 32, 480, blind=True),
    Run("cache_then_ask", "hard", 32, 480, blind=True),
    Run("cache_then_ask", "hard", 100, 240),
    Run("multi_turn", "hard", 32, 240),
    Run("paper_literal", "hard", 32, 240),
)
QUICK = (Run("cache_then_ask", "hard", 8, 12),)
_FRAMES_PER_BATCH = {"cuda": 1536, "cpu": 64}


@register("bench", "pocketbench")
class PocketBenchBench(Bench):
    """Writes the answers that `pocketbench_card` and the ledger read."""

    name = "pocketbench"
    description = (
        "the pocket VLM's answers to PocketBench, full precision and round to nearest (2 min on an H200, hours without a GPU)"
    )
    columns = {  # noqa: RUF012
        "setting": "method, bits, granularity and window size; fp16 is full precision",
        "method": "quantizer, or fp16",
        "num_bits": "bits per code; 16 for full precision",
        "granularity": "which elements of a window share scale and minimum",
        "protocol": "what was read when the cache was quantized",
        "split": "easy or hard",
        "seed": "stream of videos",
        "num_frames": "frames per video, 64 visual tokens each",
        "blind": "whether the visual tokens were zeroed",
        "index": "number of the question in its stream",
        "task": "task type",
        "answer": "the right option, 0 to 3",
        "chosen": "the option with the highest log-probability",
        "log_prob_0": "log-probability of option 0, its tokens and the end token summed, nats",
        "log_prob_1": "of option 1",
        "log_prob_2": "of option 2",
        "log_prob_3": "of option 3",
        "bits_per_element": "of K and V of the visual tokens, scales and minima included",
        "bytes_held": "bytes of K and V of the visual tokens, all layers",
        "bytes_fp16": "what the same elements take in 16 bits",
        "weights": "first 12 digits of the sha256 of the pocket VLM's file",
        "generator": "version of PocketBench and first 12 digits of its hash",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per setting and question."""
        import pandas as pd

        from wqlab.evals import pocketbench
        from wqlab.evals.scoring import Setting, find_device, score_settings
        from wqlab.models import pocket

        device = find_device()
        loaded = pocket.load(dtype="bfloat16" if device.type == "cuda" else "float32")
        settings = [Setting("rtn", bits, grain) for grain in ("window_channel", "window") for bits in (4, 2)]
        tables = []
        runs = QUICK if quick else RUNS
        for i, run in enumerate(runs):
            progress.report(f"{run.split} {run.num_frames} frames, {run.protocol}", i, len(runs))
            table = score_settings(
                loaded,
                [] if run.blind else settings,
                **run._asdict(),
                seed=SEED,
                batch_size=max(1, _FRAMES_PER_BATCH[device.type] // run.num_frames),
                device=device,
                out=paths.cache_dir() / "evals",  # a run that was interrupted continues
            )
            tables.append(table)
        data = pd.concat(tables, ignore_index=True)
        data["num_bits"] = data["num_bits"].fillna(16).astype(int)
        adapter = next(entry.sha256 for entry in loaded.inputs if "pocket-vlm" in entry.name)
        data["weights"], data["generator"] = adapter[:12], f"{pocketbench.VERSION} {pocketbench.generator_hash()[:12]}"
        return data[list(self.columns)]
