"""PocketBench with a quantized cache: every question answered in full precision and with each setting, from one prefill."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wqlab import paths, progress, registry
from wqlab.errors import MissingPartError, ParameterError
from wqlab.evals import pocketbench
from wqlab.evals.protocols import Protocol
from wqlab.evals.scoring.batch import VideoBatch
from wqlab.evals.scoring.facts import SEED, VIDEOS, ModelFacts
from wqlab.evals.scoring.journal import Answer, Journal, write_result
from wqlab.evals.scoring.settings import FULL, CacheSetting, Exam, Setting
from wqlab.evals.scoring.stream import Stream
from wqlab.evals.scoring.table import summarise_setting, to_table
from wqlab.evals.threads import polite_threads
from wqlab.models.pocket import prompt
from wqlab.models.pocket.vision import NUM_PATCHES
from wqlab.profile import environment

if TYPE_CHECKING:
    import pandas as pd

#: Rooms whose code decides an answer: a journal of other code is not continued.
_CODE = ("cache", "evals", "hf", "layouts", "models/pocket", "quantizers", "windows")
#: Fields of `Exam` that decide an answer.
_ASKED = ("protocol", "split", "seed", "num_frames", "blind")
#: Videos at a time.
_BATCH = {"cpu": 2, "cuda": 16}


class _Run:
    """What is asked of which model; `finish` does the work.

    Parameters
    ----------
    loaded : object
        With ``model``, ``tokenizer`` and ``inputs``.
    settings : list of CacheSetting
        Full precision among them.
    exam : Exam
        The questions.

    Raises
    ------
    ParameterError
        For more frames than the context holds.
    """

    def __init__(self, loaded: Any, settings: list[CacheSetting], exam: Exam) -> None:
        self.loaded, self.settings, self.exam = loaded, settings, exam
        self.embeddings = loaded.model.get_input_embeddings()
        self.device, self.dtype = self.embeddings.weight.device, self.embeddings.weight.dtype
        # A model that computes in float32 holds what a GPU would hold, 16 bits per number, also of metadata.
        self.storage = torch.float16 if self.dtype == torch.float32 else self.dtype
        self.items = list(pocketbench.items(exam.split, exam.seed, exam.num_frames, stop=exam.limit))
        protocol: Protocol = registry.lookup("protocol", exam.protocol)()
        self.prefix = prompt.prefix_ids(loaded.tokenizer)
        self.turns = [protocol.turn(loaded.tokenizer, item.questions) for item in self.items]
        self.options = [[prompt.answer_ids(loaded.tokenizer, text) for text in turn.question.options] for turn in self.turns]
        known = [turn.known for turn in self.turns]
        self.words = [prompt.encode(loaded.tokenizer, prompt.with_options(q.text, q.options)) for q in known]
        self.known = [prompt.question_ids(loaded.tokenizer, q.text, q.options) for q in known]
        self.facts = ModelFacts(loaded, exam.split, exam.num_frames)
        self._check_context()

    def _check_context(self) -> None:
        text = len(self.prefix) + max(
            len(turn.prefilled) + len(turn.asked) + max(map(len, options))
            for turn, options in zip(self.turns, self.options, strict=True)
        )
        context = int(self.loaded.model.config.get_text_config().max_position_embeddings)
        frames, visual = self.exam.num_frames, self.exam.num_frames * NUM_PATCHES
        if visual + text > context:
            raise ParameterError(
                f"num_frames = {frames} makes {visual:,} visual tokens, and up to {text} of text go with them; the context holds "
                f"{context:,} tokens, so at most {(context - text) // NUM_PATCHES} frames fit"
            )

    def key(self) -> dict[str, Any]:
        """Return all that decides an answer. How many are asked, and how many at a time, does not."""
        versions = environment.versions()
        return {
            "benchmark": "pocketbench",
            "generator": {"version": pocketbench.VERSION, "sha256": pocketbench.generator_hash()},
            "weights": {entry.name: entry.sha256 for entry in self.loaded.inputs},
            "settings": [{"kind": type(s).__name__, **asdict(s)} for s in self.settings],  # type: ignore[call-overload]
            "calibrated_on": {"seed": SEED, "videos": VIDEOS},
            **{name: getattr(self.exam, name) for name in _ASKED},
            "dtype": str(self.dtype),
            "device": environment.hardware_line() if self.device.type == "cuda" else self.device.type,
            "code": _code_hash(),
            "versions": {name: versions[name] for name in ("torch", "transformers")},
        }

    def finish(self, journal: Journal, batch_size: int) -> None:
        """Answer what the journal lacks."""
        places = [place for place, item in enumerate(self.items) if item.index not in journal.answers]
        done = len(self.items) - len(places)
        progress.report("questions", done, len(self.items))
        for low in range(0, len(places), batch_size):
            batch = places[low : low + batch_size]
            journal.add(self._answer(batch))
            progress.report("questions", done + low + len(batch), len(self.items))

    @torch.inference_mode()
    def read(self, places: Sequence[int]) -> VideoBatch:
        """Draw, see and prefill the videos at `places` of `items`, and what the protocol has read before the cache is quantized."""
        model, items, turns = self.loaded.model, [self.items[i] for i in places], [self.turns[i] for i in places]
        if self.exam.blind:
            size = len(items), self.exam.num_frames * NUM_PATCHES, self.embeddings.weight.shape[1]
            video = torch.zeros(size, dtype=self.dtype, device=self.device)
        else:
            video = model.get_video_features(pocketbench.draw(items, self.device)).to(self.dtype)
        prefix = self.embeddings(torch.tensor(self.prefix, device=self.device)).expand(len(items), -1, -1)
        stream = Stream.prefill(model, torch.cat([prefix, video], dim=1))
        stream.read([turn.prefilled for turn in turns])
        return VideoBatch(
            items=items,
            stream=stream,
            video=video,
            start=len(self.prefix),
            storage=self.storage,
            words=[self.embeddings(torch.tensor(self.words[i], device=self.device)) for i in places],
            asked=[self.known[i] for i in places],
            known=[turn.known for turn in turns],
            tokens_per_frame=NUM_PATCHES,
            facts=self.facts,
        )

    @torch.inference_mode()
    def _answer(self, places: Sequence[int]) -> list[Answer]:
        began = time.perf_counter()
        items, turns = [self.items[i] for i in places], [self.turns[i] for i in places]
        asked, options = [turn.asked for turn in turns], [self.options[i] for i in places]
        batch = self.read(places)
        scores, num_bytes, elements = {}, {}, {}
        for setting in self.settings:
            label, asking = setting.label, batch.stream.moved_to(setting.cache(batch))
            num_bytes[label], elements[label] = self._held(setting, asking.cache.report(), batch)
            scores[label] = asking.score(asked, options)
        seconds = (time.perf_counter() - began) / len(items)
        return [
            Answer(
                index=item.index,
                task=turn.question.task,
                answer=turn.question.answer,
                log_probs={label: values[row].tolist() for label, values in scores.items()},
                num_bytes=num_bytes,
                num_elements=elements,
                seconds=seconds,
            )
            for row, (item, turn) in enumerate(zip(items, turns, strict=True))
        ]

    def _held(self, setting: CacheSetting, report: dict[str, Any], batch: VideoBatch) -> tuple[int, int]:
        """Return, of one row, the bytes that hold its K and V and their number of elements, from the report of the whole cache.

        Where text is held in full precision its bytes are known, and only the video's count.
        """
        rows, tokens = len(batch.items), report["tokens"]
        held, per_token = report["bytes_held"], report["bytes_fp16"] // 2 // tokens
        if not setting.encodes_text:
            visual = batch.stop - batch.start
            held -= (tokens - visual) * per_token * self.storage.itemsize
            tokens = visual
        return round(held / rows), tokens * per_token // rows


def read_videos(loaded: Any, exam: Exam, batch_size: int | None = None) -> Iterator[VideoBatch]:
    """Yield the videos of an exam, prefilled in full precision, for measurements that answer no question.

    Parameters
    ----------
    loaded, batch_size
        As `score_settings`.
    exam : Exam
        Which videos.

    Raises
    ------
    ParameterError
        For more frames than the context holds.
    """
    run = _Run(loaded, [Setting()], exam)
    size = batch_size or _BATCH.get(run.device.type, 1)
    with polite_threads():
        for low in range(0, len(run.items), size):
            progress.report("questions", low, len(run.items))
            yield run.read(range(low, min(low + size, len(run.items))))


def score_settings(
    loaded: Any,
    settings: Iterable[CacheSetting],
    *,
    protocol: str = "cache_then_ask",
    split: str = "easy",
    seed: int = 0,
    limit: int = 100,
    num_frames: int = 32,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    blind: bool = False,
    out: Path | str | None = None,
) -> pd.DataFrame:
    """Answer PocketBench questions with several settings; full precision is always among them.

    A video is drawn, seen and prefilled once, in full precision. Each setting's cache is then filled with those K and V, and the
    model reads the question from it: settings differ in the cache and in nothing else, so they compare question by question.

    Parameters
    ----------
    loaded : object
        Of `wqlab.models.pocket.load`: ``model``, ``tokenizer``, ``inputs``.
    settings : iterable of CacheSetting
        What is compared.
    protocol, split, seed, limit, num_frames, blind
        As `Exam`.
    batch_size : int, optional
        Videos at a time; default 2 on a CPU, 16 on a GPU. Changes speed and memory only.
    device : str, optional
        Where to run; default: where the model is.
    out : path, optional
        Keep the answers in a folder in here, so that an interrupted run can be continued. Default: keep nothing.

    Returns
    -------
    pandas.DataFrame
        One row per setting and question; columns as `wqlab.evals.scoring.table.to_table` says. Its ``attrs`` hold ``run`` (all
        that decided the answers), ``kept`` (answers from a run before), ``notes`` (what was wrong with its file) and ``folder``.

    Raises
    ------
    UnknownNameError
        For another protocol or split.
    ParameterError
        For a number outside its limits, and more frames than the context holds.
    MissingPartError
        For a device that is not here.
    """
    exam = Exam(protocol, split, seed, limit, num_frames, blind)
    if batch_size is not None and batch_size < 1:
        raise ParameterError(f"batch_size = {batch_size} is no number of videos; take 1 or more")
    if device is not None:
        loaded.model.to(find_device(device))
    chosen = [Setting(), *(setting for setting in dict.fromkeys(settings) if setting.label != FULL)]
    run = _Run(loaded, chosen, exam)
    key = run.key()
    journal = Journal(key, [setting.label for setting in chosen], Path(out) if out is not None else None)
    kept = sum(item.index in journal.answers for item in run.items)
    with polite_threads():
        run.finish(journal, batch_size or _BATCH.get(run.device.type, 1))
    # A longer run may have left answers beyond this one's limit.
    table = to_table((journal.answers[item.index] for item in run.items), chosen, {name: key[name] for name in _ASKED})
    table.attrs = {"run": key, "kept": kept, "notes": journal.notes, "folder": journal.folder and str(journal.folder)}
    return table


def evaluate(
    loaded: Any,
    setting: CacheSetting | None = None,
    *,
    protocol: str = "cache_then_ask",
    split: str = "easy",
    seed: int = 0,
    limit: int = 100,
    num_frames: int = 32,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    blind: bool = False,
    out: Path | str | None = None,
) -> dict[str, Any]:
    """Return how one setting answers PocketBench, against full precision.

    Parameters are those of `score_settings`, with one `setting` (default: full precision itself), but answers are always kept: in
    `out`, by default the cache's folder ``evals``. A run that was interrupted, or ended at a smaller `limit`, is continued.

    Returns
    -------
    dict
        JSON-ready. ``setting``, its label; its fields and the other parameters; ``n`` and ``one_answer`` (1 / n, the smallest step
        of an accuracy); each metric of `paired.METRICS` with ``<metric>_interval``, 95 %, paired over the questions; ``tasks``,
        the same per task; ``bits_per_element``, ``bytes_held`` and ``bytes_fp16``: what the cache holds for the visual tokens of
        one video, K and V of all layers, scales and minima included (of all tokens where the setting encodes text too);
        ``generator``, ``weights``, ``dtype``, ``model``, ``versions``, ``git_commit``, ``hardware``; ``runtime_s``, the time of
        all answers, also of those ``kept`` from before; ``notes``; ``folder``, where answers and this result lie.

    Raises
    ------
    UnknownNameError, ParameterError, MissingPartError, OutputError
        As `score_settings`, before anything is computed.
    """
    setting = setting if setting is not None else Setting()
    table = score_settings(
        loaded,
        [setting],
        protocol=protocol,
        split=split,
        seed=seed,
        limit=limit,
        num_frames=num_frames,
        batch_size=batch_size,
        device=device,
        blind=blind,
        out=out if out is not None else paths.cache_dir() / "evals",
    )
    mine, run = table[table["setting"] == setting.label], table.attrs["run"]
    result = {
        "setting": setting.label,
        **asdict(setting),  # type: ignore[call-overload]  # all are dataclasses
        **{name: run[name] for name in ("benchmark", *_ASKED)},
        "one_answer": 1 / len(mine),
        **summarise_setting(table, setting.label),
        **{name: mine[name].iloc[0] for name in ("bits_per_element", "bytes_held", "bytes_fp16")},
        **{name: run[name] for name in ("generator", "weights", "dtype")},
        "model": loaded.note,
        "versions": environment.versions(),
        "git_commit": environment.git_commit(),
        "hardware": environment.hardware_line(),
        "runtime_s": float(mine["seconds"].sum()),
        **{name: table.attrs[name] for name in ("kept", "notes", "folder")},
    }
    write_result(Path(result["folder"]), result)
    return result


def find_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device of a name; without one the GPU where there is one, else the CPU.

    Raises
    ------
    ParameterError
        For a word that names no device.
    MissingPartError
        For a device that is not here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError(f"device {name!r} is refused: use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MissingPartError(f"device {name}: torch sees no CUDA device here; use cpu")
    return device


@lru_cache(maxsize=1)  # what runs was imported once; files may change under a long run
def _code_hash() -> str:
    """Return a sha256 over the source that decides an answer."""
    package = Path(paths.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(file for room in _CODE for file in (package / room).rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
