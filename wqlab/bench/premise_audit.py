"""Does a score find the windows that answer a question? Every scorer against PocketBench's ground truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab.bench import Bench
from wqlab.registry import register

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

#: A stream that chose nothing, and the one of development that chooses layers and defaults.
SEED, DEVELOPMENT_SEED = 1002, 10
FRESH, DEVELOPMENT = "fresh", "development"
#: Attention scorers with layers chosen on the development part, three each.
EARLY, BEST = "attention, best early layers", "attention, best layers"
_BATCH = {"cuda": 32, "cpu": 2}


class Run(NamedTuple):
    """Videos of one kind; `part` says whether they choose (development) or report (fresh)."""

    part: str
    split: str
    seed: int
    limit: int
    num_frames: int = 32


RUNS = (
    Run(DEVELOPMENT, "hard", DEVELOPMENT_SEED, 320),
    Run(FRESH, "hard", SEED, 480),
    Run(FRESH, "easy", SEED, 480),
)
QUICK = (Run(DEVELOPMENT, "hard", DEVELOPMENT_SEED, 2, 8), Run(FRESH, "hard", SEED, 4, 8))


@register("bench", "premise_audit")
class PremiseAuditBench(Bench):
    """Writes what `premise_audit` and `similarity_functions` read."""

    name = "premise_audit"
    description = "how well each scorer finds the windows that answer a question (1 min on an H200, hours without a GPU)"
    columns = {  # noqa: RUF012
        "part": "fresh: reported; development: chose layers and defaults",
        "split": "easy or hard",
        "index": "number of the question in its stream",
        "task": "task type",
        "scorer": "a registered scorer, or the attention of one layer, of the three best on the development part, or of all",
        "layers": "of the attention, with spaces between; empty for scorers of embeddings and for all layers",
        "auc": "area under the ROC curve of the scores for the windows that answer; 0.5 is chance",
        "precision": "share of windows that answer among the k highest scores, k being their number",
        "base_rate": "share of windows that answer: the precision of chance",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per question and scorer; questions that every window answers have nothing to tell apart."""
        import pandas as pd

        from wqlab.evals.premise import LAYER, audit
        from wqlab.evals.scoring import Exam, find_device, read_videos
        from wqlab.models import pocket
        from wqlab.windows.scorers.attention import AttentionScorer

        device = find_device()
        loaded = pocket.load(dtype="bfloat16" if device.type == "cuda" else "float32")
        loaded.model.to(device)
        rows: list[dict[str, Any]] = []
        sets: dict[str, tuple[int, ...]] = {}
        for run in QUICK if quick else RUNS:
            exam = Exam(split=run.split, seed=run.seed, limit=run.limit, num_frames=run.num_frames)
            found = [row for batch in read_videos(loaded, exam, _BATCH[device.type]) for row in audit(batch, sets)]
            if run.part == DEVELOPMENT:
                sets = chosen_layers(found)
            rows += [{"part": run.part, "split": run.split, **row} for row in found]
        table = pd.DataFrame(rows)
        named = {"attention": AttentionScorer().layers, **sets}  # the defaults of this version, which a later one may change
        table["layers"] = [
            str(row["layer"]) if row["scorer"] == LAYER else " ".join(map(str, named.get(row["scorer"], ()))) for row in rows
        ]
        return table[list(self.columns)].round({"auc": 5, "precision": 5, "base_rate": 5})


def chosen_layers(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the layers of `EARLY` (of the first third) and of `BEST`, from the audit of development videos."""
    from wqlab.evals.premise import LAYER, best_layers

    depth = 1 + max(row["layer"] for row in rows if row["scorer"] == LAYER)
    return {EARLY: best_layers(rows, below=max(depth // 3, 1)), BEST: best_layers(rows)}
