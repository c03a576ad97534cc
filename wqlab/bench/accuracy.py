"""What each way to hold a cache does to answers: one prefill per video, and every setting's answers from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wqlab import paths, progress
from wqlab.bench import Bench
from wqlab.bench.premise_audit import DEVELOPMENT, DEVELOPMENT_SEED, FRESH, SEED, chosen_layers
from wqlab.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from wqlab.evals.scoring import CacheSetting
    from wqlab.hf.transformers_cache import Backend

#: Backends of transformers' QuantizedCache that are packages of their own.
LIBRARIES: tuple[Backend, ...] = ("quanto", "hqq")
GROUPS = ("methods", "ablation", "granularity", "scorers", "long", "defaults")
#: Videos of the development stream that calibrate the attention scorers' layers.
_CALIBRATED_ON = 64
_FRAMES_PER_BATCH = {"cuda": 1536, "cpu": 64}


class Run(NamedTuple):
    """Questions of one kind, and the groups of settings that answer them."""

    part: str
    protocol: str
    split: str
    seed: int
    limit: int
    groups: tuple[str, ...]
    num_frames: int = 32


_ALL = ("methods", "ablation", "granularity", "scorers")
RUNS = (
    Run(FRESH, "cache_then_ask", "hard", SEED, 480, _ALL),
    Run(FRESH, "cache_then_ask", "easy", SEED, 480, _ALL),
    Run(FRESH, "paper_literal", "hard", SEED, 240, ("methods",)),
    Run(FRESH, "multi_turn", "hard", SEED, 240, ("methods", "ablation")),
    Run(FRESH, "cache_then_ask", "hard", SEED, 240, ("long", "scorers"), 100),
    Run(DEVELOPMENT, "cache_then_ask", "hard", DEVELOPMENT_SEED, 320, ("defaults",)),
    Run(DEVELOPMENT, "cache_then_ask", "hard", DEVELOPMENT_SEED, 240, ("defaults",), 100),
)
QUICK = (
    Run(FRESH, "cache_then_ask", "hard", SEED, 4, _ALL, 8),
    Run(DEVELOPMENT, "cache_then_ask", "hard", DEVELOPMENT_SEED, 2, ("defaults",), 8),
)


def roster(group: str, layers: dict[str, tuple[int, ...]], libraries: Iterable[Backend] = ()) -> list[CacheSetting]:
    """Return the settings of a group.

    Parameters
    ----------
    group : str
        One of `GROUPS`.
    layers : dict
        Of the attention scorers, by name.
    libraries : iterable of str
        Backends of transformers' QuantizedCache that are installed.
    """
    from wqlab.evals.scoring import PlanSetting, Setting, TransformersSetting

    attention = [PlanSetting(scorer="attention", layers=chosen, normalize="rank") for chosen in layers.values()]
    usual = [PlanSetting(normalize=normalize) for normalize in ("none", "minmax", "rank")]
    uniform = [("fp8", 8), ("rtn", 8), *((m, b) for b in (4, 2) for m in ("rtn", "kivi", "smoothquant", "skvq")), ("qoq", 4)]
    settings: dict[str, list[CacheSetting]] = {
        "methods": [
            *(Setting(method, bits) for method, bits in uniform),
            *(Setting(method, bits, policy="published") for method in ("kivi", "skvq") for bits in (4, 2)),
            *(TransformersSetting(backend, bits) for backend in libraries for bits in (4, 2)),
            *usual,
        ],
        "ablation": [
            setting
            for normalize in ("rank", "minmax")
            for setting in (
                PlanSetting(normalize=normalize), PlanSetting(normalize=normalize, first_window_full=False),
                PlanSetting(normalize=normalize, order="permuted"), PlanSetting(normalize=normalize, order="permuted", seed=1),
                PlanSetting(normalize=normalize, order="truth"), PlanSetting(normalize=normalize, order="inverse"),
            )
        ],
        "granularity": [
            *(Setting("rtn", bits, grain) for bits in (4, 2) for grain in ("window_channel", "window_head", "window")),
            *(PlanSetting(normalize="rank", granularity=grain) for grain in ("window_channel", "window_head", "window")),
        ],
        "long": [
            *(Setting(method, bits) for bits in (4, 2) for method in ("rtn", "kivi")),
            *usual,
            PlanSetting(normalize="rank", first_window_full=False),
            *(PlanSetting(normalize="rank", order="permuted", seed=seed) for seed in (0, 1)),
        ],
        "scorers": [
            *(PlanSetting(scorer=scorer, normalize="rank") for scorer in ("cosine", "pearson", "euclidean", "random")),
            *attention,
            PlanSetting(normalize="rank", order="truth"),
            PlanSetting(normalize="rank", order="inverse"),
        ],
        "defaults": [
            *usual,
            *(PlanSetting(normalize=normalize, alpha=alpha) for normalize in ("minmax", "rank") for alpha in (0.5, 8.0)),
            *(PlanSetting(scorer=scorer, normalize=n) for scorer in ("pearson", "euclidean", "random") for n in ("minmax", "rank")),
            *attention,
            *(PlanSetting(scorer="attention", layers=chosen, normalize="minmax") for chosen in layers.values()),
            Setting("rtn", 4),
            Setting("rtn", 2),
        ],
    }  # fmt: skip
    return settings[group]


@register("bench", "accuracy")
class AccuracyBench(Bench):
    """Writes the answers that `accuracy_by_method`, `ablation`, `quantization_granularity` and others read."""

    name = "accuracy"
    description = "the pocket VLM's answers with every method, ablation and scorer (6 min on an H200, days without a GPU)"
    columns = {  # noqa: RUF012
        "part": "fresh: reported; development: chose the defaults",
        "protocol": "what was read when the cache was quantized",
        "split": "easy or hard",
        "num_frames": "frames per video, 64 visual tokens each",
        "setting": "how the cache was held; fp16 is full precision",
        "groups": "of settings that this one belongs to, by first letters: methods, ablation, granularity, scorers, long, defaults",
        "index": "number of the question in its stream",
        "task": "task type",
        "answer": "the right option, 0 to 3",
        "log_prob_0": "log-probability of option 0, its tokens and the end token summed, nats",
        "log_prob_1": "of option 1",
        "log_prob_2": "of option 2",
        "log_prob_3": "of option 3",
        "bits_per_element": "of K and V, scales, minima and positions included; of the video, or of all where text is encoded too",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per setting and question."""
        import pandas as pd

        from wqlab.evals.premise import audit
        from wqlab.evals.scoring import Exam, Setting, find_device, read_videos, score_settings
        from wqlab.models import pocket

        device = find_device()
        loaded = pocket.load(dtype="bfloat16" if device.type == "cuda" else "float32")
        loaded.model.to(device)
        runs = QUICK if quick else RUNS
        frames = runs[0].num_frames
        seen = Exam(split="hard", seed=DEVELOPMENT_SEED, limit=2 if quick else _CALIBRATED_ON, num_frames=frames)
        per_batch = max(1, _FRAMES_PER_BATCH[device.type] // frames)
        layers = chosen_layers([row for batch in read_videos(loaded, seen, per_batch) for row in audit(batch)])
        tables = []
        for number, run in enumerate(runs):
            progress.report(f"{run.part} {run.split}, {run.protocol}", number, len(runs))
            groups: dict[CacheSetting, list[str]] = {Setting(): list(run.groups)}
            for group in run.groups:
                for setting in roster(group, layers, installed()):
                    groups.setdefault(setting, []).append(group)
            table = score_settings(
                loaded,
                groups,
                protocol=run.protocol,
                split=run.split,
                seed=run.seed,
                limit=run.limit,
                num_frames=run.num_frames,
                batch_size=max(1, _FRAMES_PER_BATCH[device.type] // run.num_frames),
                device=device,
                out=paths.cache_dir() / "evals",  # a run that was interrupted continues
            )
            named = {setting.label: "".join(group[0] for group in found) for setting, found in groups.items()}
            tables.append(table.assign(part=run.part, groups=table["setting"].map(named)))
        data = pd.concat(tables, ignore_index=True)
        return data[list(self.columns)].round({**{f"log_prob_{i}": 3 for i in range(4)}, "bits_per_element": 4})


def installed() -> list[Backend]:
    """Return those of `LIBRARIES` that are here; `accuracy_by_method` names those that a record lacks."""
    from wqlab.hf.transformers_cache import is_installed

    return [name for name in LIBRARIES if is_installed(name)]
