"""Train the pocket VLM: a projector from EfficientNet-Lite0 to SmolLM2-135M-Instruct, and adapters inside the language model.

Only projector and adapters learn. A run is a number of steps that is fixed in advance; it can stop after any of them and go on
later, on another machine too.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wqlab import paths, progress
from wqlab.errors import ParameterError
from wqlab.evals.pocketbench.drawing import Canvas
from wqlab.models.pocket import prompt
from wqlab.models.pocket.adapter_file import read_adapter, write_adapter
from wqlab.models.pocket.lora import inject, lora_state
from wqlab.models.pocket.projector import PocketProjector
from wqlab.models.pocket.vision import NUM_PATCHES, load_vision, normalise, patch_features
from wqlab.training import ranks
from wqlab.training.batches import IGNORED, Batch, Stream
from wqlab.training.curriculum import Step, choose, rate

_log = logging.getLogger(__name__)
#: Loss and token accuracy per kind of step; lies beside the weights.
LOG = "training.csv"
CHECKPOINT = "checkpoint.pt"
_LOG_EVERY = 25


@dataclass(frozen=True)
class Settings:
    """What defines a run; a checkpoint goes on only with the same settings.

    Parameters
    ----------
    steps : int
        In all.
    tokens_per_step : int
        Visual and text tokens of a step and process, about.
    seed : int
        Of weights and videos.
    rank : int
        Of the adapters.
    hidden : int
        Of the projector.
    projector_rate, lora_rate : float
        Learning rates before the schedule's factor.
    begin : float
        Share of the curriculum that is skipped, 0 to 1: for going on from weights that learned it.
    processes : int
        That train together, one GPU each; every one of them sees `tokens_per_step` of its own.
    """

    steps: int = 5000
    tokens_per_step: int = 49152
    seed: int = 1
    rank: int = 16
    hidden: int = 1152
    projector_rate: float = 1e-3
    lora_rate: float = 5e-4
    begin: float = 0.0
    processes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.begin < 1:
            raise ParameterError(f"begin = {self.begin} is no share of the curriculum: 0 or more, and less than 1")
        if self.steps < 1 or self.tokens_per_step < 1:
            raise ParameterError(f"steps = {self.steps} and tokens_per_step = {self.tokens_per_step} must be 1 or more")

    def done(self, step: int) -> float:
        """Return the share of the curriculum that is behind at a step."""
        return self.begin + (1 - self.begin) * step / self.steps

    def plan(self, rank: int = 0) -> list[tuple[int, Step, int]]:
        """Return index of the batch, step and number of videos of every step, for one of the processes.

        All take the same kind of step at the same time, so that none waits for another.
        """
        rng = random.Random(f"plan/{self.seed}")
        chosen = [choose(rng, self.done(index)) for index in range(self.steps)]
        return [
            (i * self.processes + rank, s, max(1, self.tokens_per_step // (s.num_frames * NUM_PATCHES + 64)))
            for i, s in enumerate(chosen)
        ]


class Trainer:
    """Model, optimizer and log of one run.

    Parameters
    ----------
    settings : Settings
        Of the run.
    device : str
        ``"cuda"`` or ``"cpu"`` (for tests: a step takes minutes).
    language_model : LlamaForCausalLM
        Frozen; its linear layers are wrapped in place.
    vision : EfficientNetLite0
        Frozen.
    tokenizer : PreTrainedTokenizerBase
        Of the language model.
    compiled : bool
        Whether to compile the decoder layers: faster after a minute.
    """

    def __init__(
        self, settings: Settings, device: str, language_model: Any, vision: nn.Module, tokenizer: Any, compiled: bool = False
    ) -> None:
        torch.manual_seed(settings.seed)
        on_gpu = device != "cpu"
        self.settings, self.device, self.tokenizer = settings, torch.device(device), tokenizer
        self.vision_dtype = torch.float16 if on_gpu else torch.float32
        self.vision = vision.to(self.device, self.vision_dtype).eval().requires_grad_(False)
        self.vision.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.language_model = language_model.to(self.device, torch.bfloat16 if on_gpu else torch.float32)
        gain = float(language_model.get_input_embeddings().weight.detach().float().std())
        self.adapters = inject(self.language_model, settings.rank)
        width = language_model.config.hidden_size
        self.projector = PocketProjector(hidden=settings.hidden, out=width, gain=gain).to(self.device)
        self.canvas = Canvas(self.device)
        self.parameters = [*self.projector.parameters(), *self.adapters]
        groups = [
            {"params": list(self.projector.parameters()), "base": settings.projector_rate},
            {"params": self.adapters, "base": settings.lora_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=on_gpu)
        self.step, self.log, self.seconds = 0, list[dict[str, Any]](), 0.0
        self.started_from: dict[str, Any] | None = None
        #: Number of this run in the history of its weights, and the steps and seconds of the runs before.
        self.run, self.before = 1, (0, 0.0)
        self._waiting: list[tuple[Step, Tensor, Tensor]] = []
        self._prefix = torch.tensor(prompt.prefix_ids(tokenizer), device=self.device)
        if compiled:
            for layer in self.language_model.model.layers:
                layer.compile(dynamic=True)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy over the answers' tokens, in nats, and the share of them that is predicted right."""
        with torch.no_grad():
            frames = self.canvas.frames(batch.orders)
            pixels = normalise(frames.flatten(0, 1)).to(self.vision_dtype).to(memory_format=torch.channels_last)
            features = patch_features(self.vision(pixels))
        embed = self.language_model.get_input_embeddings()
        videos = batch.ids.shape[0]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            visual = self.projector(features.reshape(videos, -1, features.shape[-1]).to(torch.float32))
        text = embed(batch.ids.to(self.device, non_blocking=True))
        inputs = torch.cat([embed(self._prefix).expand(videos, -1, -1), visual.to(text.dtype), text], dim=1)
        # Right padding under causal attention needs no mask, which keeps the fast attention kernel.
        hidden = self.language_model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, -text.shape[1] :]
        counted = (batch.labels != IGNORED).flatten().nonzero().squeeze(1).to(self.device, non_blocking=True)
        labels = batch.labels.to(self.device, non_blocking=True).flatten()[counted]
        logits = self.language_model.lm_head(hidden.flatten(0, 1)[counted]).float()
        return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

    def advance(self, batch: Batch) -> None:
        """Take one step."""
        loss, accuracy = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        ranks.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        factor = rate(self.step, self.settings.done(self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * factor
        self.optimizer.step()
        self.step += 1
        self._waiting.append((batch.step, loss.detach(), accuracy))

    def note(self) -> None:
        """Add the steps since the last note to the log, a row per kind and length."""
        gathered: dict[Step, list[tuple[float, float]]] = defaultdict(list)
        for step, loss, accuracy in self._waiting:
            gathered[step].append((float(loss), float(accuracy)))
        self._waiting.clear()
        for step, found in sorted(gathered.items()):
            means = [sum(part) / len(found) for part in zip(*found, strict=True)]
            row: dict[str, Any] = {
                "run": self.run,
                "step": self.before[0] + self.step,
                "seconds": round(self.before[1] + self.seconds, 1),
            }
            row |= {"kind": step.kind, "num_frames": step.num_frames, "steps": len(found)}
            self.log.append({**row, "loss": round(means[0], 5), "token_accuracy": round(means[1], 5)})

    def save(self, path: Path) -> None:
        """Write a checkpoint, atomically."""
        state = {
            "settings": asdict(self.settings), "step": self.step, "seconds": self.seconds, "log": self.log,
            "started_from": self.started_from, "run": self.run, "before": self.before,
            "projector": self.projector.state_dict(), "adapters": [p.detach() for p in self.adapters],
            "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        with paths.atomic_path(path) as temporary:
            torch.save(state, temporary)

    def start_from(self, path: Path | str) -> None:
        """Begin with the weights of a finished file, and go on with the log beside it; the optimizer starts anew.

        Raises
        ------
        MissingPartError, DamagedFileError
            As `wqlab.models.pocket.adapter_file.read_adapter`.
        """
        part = read_adapter(path)
        self.projector.load_state_dict(part.projector)
        with torch.no_grad():
            for name, parameter in lora_state(self.language_model).items():
                parameter.copy_(part.lora[name])
        kept = ("settings", "step", "seconds", "started_from", "provenance")
        self.started_from = {"sha256": part.sha256, **{name: part.meta[name] for name in kept if name in part.meta}}
        earlier = Path(path).with_name(LOG)
        if earlier.is_file():
            rows = pd.read_csv(earlier)
            self.log = [dict(zip(rows.columns, row, strict=True)) for row in rows.itertuples(index=False)]
            self.run, self.before = int(rows["run"].max()) + 1, (int(rows["step"].max()), float(rows["seconds"].max()))

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        ParameterError
            When it is of a run with other settings.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise ParameterError(
                f"{path} is of a run with {state['settings']}, not {asdict(self.settings)}; "
                "go on with its settings, or name another --out"
            )
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]
        self.started_from, self.run, self.before = state["started_from"], state["run"], tuple(state["before"])
        self.projector.load_state_dict(state["projector"])
        with torch.no_grad():
            for parameter, value in zip(self.adapters, state["adapters"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])


def train(
    out: Path | str,
    settings: Settings | None = None,
    minutes: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    compiled: bool = False,
    start: Path | str | None = None,
) -> bool:
    """Train, or go on where `out` stopped; return whether all steps are done.

    Under torchrun its processes train one model together, and the first of them writes.

    Parameters
    ----------
    out : path
        Gets ``checkpoint.pt``, ``training.csv`` (loss and token accuracy) and, at the end, ``pocket-vlm.safetensors`` and its JSON.
    settings : Settings, optional
        Of the run.
    minutes : float, optional
        Stop with a checkpoint after this long.
    device : str, optional
        Default: ``"cuda"`` where there is one.
    workers : int, optional
        Processes that make batches; default: one less than there are cores, at least 1.
    compiled : bool
        As `Trainer`.
    start : path, optional
        A finished file whose weights a new run begins with.

    Raises
    ------
    ParameterError, OutputError, FetchError, DamagedFileError
        For another run's checkpoint, a folder that cannot be written, and as `wqlab.models.load`.
    """
    from wqlab.models import load

    began = time.perf_counter()
    me = ranks.here()
    settings = replace(settings or Settings(), processes=me.processes)
    folder = paths.output_dir(out)
    checkpoint = folder / CHECKPOINT
    loaded = load("smollm2")
    first = 0
    if checkpoint.is_file():
        first = int(torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["step"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    plan = settings.plan(me.rank)[first:]
    number = workers if workers is not None else max(1, ((os.cpu_count() or 2) - 1) // me.processes)
    # The workers are started before CUDA is, because they are forks.
    stream = torch.utils.data.DataLoader(
        Stream(loaded.tokenizer, plan, settings.seed), batch_size=None, num_workers=number, prefetch_factor=3 if number else None
    )
    batches = iter(stream)
    device = device or (f"cuda:{me.local}" if torch.cuda.is_available() else "cpu")
    with ranks.joined(me, torch.device(device)):
        trainer = Trainer(settings, device, loaded.model, load_vision(), loaded.tokenizer, compiled)
        if checkpoint.is_file():
            trainer.restore(checkpoint)
        elif start is not None:
            trainer.start_from(start)
        before, saved = trainer.seconds, time.perf_counter()
        for batch in batches:
            trainer.advance(batch)
            trainer.seconds = before + time.perf_counter() - began
            if trainer.step % _LOG_EVERY == 0 or trainer.step == settings.steps:
                trainer.note()
                last = trainer.log[-1]
                _log.info("step %d of %d, %.0f s: %s", trainer.step, settings.steps, trainer.seconds, json.dumps(last))
                progress.report(f"loss {last['loss']:.3f}", trainer.step, settings.steps)
                if me.rank == 0 and time.perf_counter() - saved > 120:
                    _keep(folder, trainer)
                    saved = time.perf_counter()
            late = minutes is not None and time.perf_counter() - began > 60 * minutes
            if minutes is not None and ranks.any_of(late, trainer.device):
                break
        trainer.note()
        if me.rank == 0:
            _keep(folder, trainer)
            write(folder, trainer, loaded)
    return trainer.step >= settings.steps


def _keep(folder: Path, trainer: Trainer) -> None:
    trainer.save(folder / CHECKPOINT)
    _write_log(folder, trainer)


def _write_log(folder: Path, trainer: Trainer) -> None:
    with paths.atomic_path(folder / LOG) as temporary:
        pd.DataFrame(trainer.log).to_csv(temporary, index=False)


def write(folder: Path, trainer: Trainer, loaded: Any) -> None:
    """Write what was trained as the file that `wqlab.models.pocket.load` reads, and the checkpoint's provenance beside it."""
    from wqlab.profile import environment

    settings = asdict(trainer.settings)
    meta = {
        "settings": settings, "step": trainer.step, "seconds": round(trainer.seconds, 1), "started_from": trainer.started_from,
        "base": [asdict(entry) for entry in loaded.inputs], "provenance": environment.provenance("wqlab models train-pocket"),
    }  # fmt: skip
    write_adapter(folder / "pocket-vlm.safetensors", trainer.projector, trainer.language_model, meta)
