"""Batches of videos and tokens, made in worker processes ahead of the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wqlab.evals.pocketbench import make_item, task_names
from wqlab.evals.pocketbench.drawing import Orders, orders
from wqlab.evals.pocketbench.scene import Scene
from wqlab.models.pocket import prompt
from wqlab.training import captions
from wqlab.training.curriculum import HARD_SHARE, TASK_WEIGHTS, Step

#: What cross entropy leaves out.
IGNORED = -100
#: Text is padded to a multiple of this, so that there are few different shapes.
_MULTIPLE = 32


class Batch(NamedTuple):
    """One step's input.

    Parameters
    ----------
    step : Step
        What it is.
    orders : Orders
        What to draw.
    ids, labels : Tensor
        int64 [videos, text]: what follows the visual tokens, padded on the right, and what each of them should predict next.
    tasks : list of str
        The first question's task, or the kind of description.
    """

    step: Step
    orders: Orders
    ids: Tensor
    labels: Tensor
    tasks: list[str]


def make(tokenizer: Any, step: Step, count: int, seed: int, index: int) -> Batch:
    """Return batch number `index` of a stream: `count` videos of one kind and length."""
    rng = random.Random(f"batch/{seed}/{index}")
    names = task_names()
    scenes, rows, said = list[Scene](), list[tuple[list[int], list[int]]](), list[str]()
    for i in range(count):
        split = "hard" if rng.random() < HARD_SHARE else "easy"
        number = index * 10_000 + i
        if step.kind == "questions":
            task = rng.choices(names, [TASK_WEIGHTS.get(name, 1.0) for name in names])[0]
            item = make_item(split, seed, number, step.num_frames, task, training=True)
            # The task's own question and some of the others, in any order: a second question has to be answered too.
            asked_now = [item.questions[0], *(q for q in item.questions[1:] if rng.random() < 0.5)]
            turns = [(q.text, q.options, q.options[q.answer]) for q in rng.sample(asked_now, len(asked_now))]
            scenes.append(item.scene)
            said.append(item.questions[0].task)
        else:
            scene, asked, described = captions.make(step.kind, split, seed, number, step.num_frames)
            turns, scenes, said = [(asked, (), described)], [*scenes, scene], [*said, step.kind]
        rows.append(_row(tokenizer, turns))
    length = -(-max(len(ids) for ids, _ in rows) // _MULTIPLE) * _MULTIPLE
    pad = tokenizer.eos_token_id
    ids = torch.tensor([row + [pad] * (length - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (length - len(row)) for _, row in rows])
    return Batch(step, orders(scenes), ids, labels, said)


def _row(tokenizer: Any, turns: list[tuple[str, tuple[str, ...], str]]) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation about one video, and as labels the next id where that belongs to an answer."""
    ids, answered = list[int](), list[bool]()
    for i, (text, options, answer) in enumerate(turns):
        asked = (prompt.follow_up_ids if i else prompt.question_ids)(tokenizer, text, options)
        told = prompt.answer_ids(tokenizer, answer)
        ids += asked + told
        answered += [False] * len(asked) + [True] * len(told)
    labels = [following if is_answer else IGNORED for following, is_answer in zip(ids[1:], answered[1:], strict=True)]
    return ids, [*labels, IGNORED]


class Stream(torch.utils.data.IterableDataset[Batch]):
    """Batches for requests that a queue of steps hands out; a worker makes whole batches.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Of the language model.
    steps : list of (int, Step, int)
        Index, step and number of videos of each batch, in order.
    seed : int
        Of the stream.
    """

    def __init__(self, tokenizer: Any, steps: list[tuple[int, Step, int]], seed: int) -> None:
        super().__init__()
        self.tokenizer, self.steps, self.seed = tokenizer, steps, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for index, step, count in self.steps[offset::stride]:
            yield make(self.tokenizer, step, count, self.seed, index)
