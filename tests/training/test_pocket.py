"""The trainer, with a tiny random language model: batches, learning, and going on after a stop."""

import subprocess
import sys
from dataclasses import asdict

import pandas as pd
import pytest
import torch

import wqlab.models
from wqlab.errors import ParameterError
from wqlab.models.pocket import prompt
from wqlab.models.pocket.vision import EfficientNetLite0
from wqlab.training import batches, pocket, ranks
from wqlab.training.curriculum import Step


class Letters:
    """A tokenizer of characters, for a vocabulary of 128; END is one token, as the real one has it."""

    eos_token_id = 2

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [2 if c == "\0" else 3 + ord(c) % 120 for c in text.replace(prompt.END, "\0")]}


def trainer(tiny_llama, **changes):
    settings = pocket.Settings(**{"steps": 6, "tokens_per_step": 200, "rank": 2, "hidden": 32} | changes)
    torch.manual_seed(0)
    return pocket.Trainer(settings, "cpu", tiny_llama, EfficientNetLite0(), Letters())


def run(own, until):
    """Take the plan's steps up to `until`, with shorter and fewer videos."""
    for index, step, _ in own.settings.plan()[own.step : until]:
        short = Step(step.kind, min(step.num_frames, 8 if step.kind == "questions" else 1))
        own.advance(batches.make(Letters(), short, 1, own.settings.seed, index))


@pytest.fixture
def another_tiny_llama(tiny_llama):
    import copy

    return copy.deepcopy(tiny_llama)


@pytest.mark.parametrize("step", [Step("questions", 8), Step("frames", 2), Step("motion", 8)])
def test_labels_are_the_next_token_of_answers_only(step):
    batch = batches.make(Letters(), step, 3, seed=4, index=1)
    assert batch.ids.shape == batch.labels.shape
    assert batch.ids.shape[1] % 32 == 0
    counted = batch.labels != batches.IGNORED
    assert counted.any(dim=1).all()
    assert torch.equal(batch.labels[:, :-1][counted[:, :-1]], batch.ids[:, 1:][counted[:, :-1]])
    # Every answer ends, so that the model learns to stop.
    ends = (batch.labels == Letters.eos_token_id).sum(dim=1)
    assert (ends >= 1).all()
    assert len(batch.tasks) == 3


def test_batches_do_not_depend_on_when_they_are_made():
    one, two = (batches.make(Letters(), Step("questions", 8), 2, 0, 7) for _ in range(2))
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.orders.sprites, two.orders.sprites)
    assert not torch.equal(one.ids, batches.make(Letters(), Step("questions", 8), 2, 0, 8).ids)


def test_workers_share_the_plan():
    plan = pocket.Settings(steps=5, tokens_per_step=200).plan()
    plan = [(index, Step("frames", 1), 1) for index, _, _ in plan]
    alone = list(batches.Stream(Letters(), plan, 0))
    shared = list(torch.utils.data.DataLoader(batches.Stream(Letters(), plan, 0), batch_size=None, num_workers=2))
    assert [b.ids.tolist() for b in alone] == [b.ids.tolist() for b in shared]


def test_processes_share_the_steps_and_never_a_video():
    settings = pocket.Settings(steps=20, processes=3)
    plans = [settings.plan(rank) for rank in range(3)]
    assert [step for _, step, _ in plans[0]] == [step for _, step, _ in plans[1]] == [step for _, step, _ in plans[2]]
    assert sorted(index for plan in plans for index, _, _ in plan) == list(range(60))


def test_two_processes_learn_what_one_would_from_both_batches(tmp_path):
    """Under torchrun: the mean of both gradients, the same weights in both, and a stop of one stops both."""
    script = tmp_path / "both.py"
    script.write_text(
        "import pathlib, sys, torch\n"
        "from wqlab.training import ranks\n"
        "me = ranks.here()\n"
        "with ranks.joined(me, torch.device('cpu')):\n"
        "    p = torch.nn.Parameter(torch.zeros(3)); q = torch.nn.Parameter(torch.zeros(2, 2))\n"
        "    ((me.rank + 1) * p.sum() + 10 * (me.rank + 1) * q.sum()).backward()\n"
        "    ranks.average_gradients([p, q])\n"
        "    assert p.grad.tolist() == [1.5] * 3 and q.grad.tolist() == [[15.0] * 2] * 2, (p.grad, q.grad)\n"
        "    assert ranks.any_of(me.rank == 1, torch.device('cpu')) and not ranks.any_of(False, torch.device('cpu'))\n"
        "pathlib.Path(sys.argv[1], f'agreed-{me.rank}').touch()\n"
    )
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("agreed-*")) == ["agreed-0", "agreed-1"]


def test_alone_nothing_is_averaged():
    p = torch.nn.Parameter(torch.zeros(2))
    p.sum().backward()
    assert ranks.here() == ranks.Ranks()
    ranks.average_gradients([p])
    assert p.grad.tolist() == [1.0, 1.0]
    assert ranks.any_of(True, torch.device("cpu"))


def test_only_projector_and_adapters_learn(tiny_llama):
    own = trainer(tiny_llama)
    frozen = {name: p.clone() for name, p in own.language_model.named_parameters() if not p.requires_grad}
    before = [p.detach().clone() for p in own.parameters]
    run(own, 3)
    assert all(torch.equal(p, frozen[name]) for name, p in own.language_model.named_parameters() if name in frozen)
    assert not any(p.requires_grad for p in own.vision.parameters())
    moved = [not torch.equal(p, old) for p, old in zip(own.parameters, before, strict=True)]
    assert all(moved)
    assert {id(p) for p in own.parameters} == {
        id(p) for m in (own.projector, own.language_model) for p in m.parameters() if p.requires_grad
    }


def test_a_batch_can_be_learned_by_heart(tiny_llama):
    own = trainer(tiny_llama, steps=200, rank=8, projector_rate=3e-2, lora_rate=3e-2)
    batch = batches.make(Letters(), Step("corners", 1), 1, 0, 0)
    first = own.loss(batch)[0].item()
    for _ in range(20):
        own.step = 150  # past the warm-up
        own.advance(batch)
    assert own.loss(batch)[0].item() < 0.95 * first


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tiny_llama, another_tiny_llama, tmp_path):
    whole = trainer(tiny_llama)
    run(whole, 3)
    whole.note()
    whole.save(tmp_path / "checkpoint.pt")
    run(whole, 6)
    resumed = trainer(another_tiny_llama)
    resumed.restore(tmp_path / "checkpoint.pt")
    assert resumed.step == 3
    assert resumed.log == whole.log
    run(resumed, 6)
    for one, two in zip(whole.parameters, resumed.parameters, strict=True):
        torch.testing.assert_close(one, two)


def test_a_new_run_begins_with_the_weights_of_a_finished_one(tiny_llama, another_tiny_llama, tmp_path):
    own = trainer(tiny_llama)
    run(own, 2)
    own.note()
    pocket._write_log(tmp_path, own)
    pocket.write(tmp_path, own, wqlab.models.LanguageModel(tiny_llama, Letters(), "tiny", "tiny", []))
    later = trainer(another_tiny_llama, begin=0.85)
    later.start_from(tmp_path / "pocket-vlm.safetensors")
    for one, two in zip(own.parameters, later.parameters, strict=True):
        torch.testing.assert_close(one.half().float(), two)
    assert later.started_from["settings"] == asdict(own.settings)
    assert later.settings.done(0) == 0.85
    run(later, 1)
    later.note()
    assert [row["run"] for row in later.log] == [1] * len(own.log) + [2]
    assert later.log[-1]["step"] == 3


def test_another_runs_checkpoint_is_refused(tiny_llama, another_tiny_llama, tmp_path):
    own = trainer(tiny_llama)
    own.save(tmp_path / "checkpoint.pt")
    with pytest.raises(ParameterError, match="go on with its settings"):
        trainer(another_tiny_llama, seed=9).restore(tmp_path / "checkpoint.pt")


def test_the_log_has_a_row_per_kind(tiny_llama, tmp_path):
    own = trainer(tiny_llama)
    run(own, 2)
    own.note()
    pocket._write_log(tmp_path, own)
    log = pd.read_csv(tmp_path / "training.csv")
    assert list(log.columns) == ["run", "step", "seconds", "kind", "num_frames", "steps", "loss", "token_accuracy"]
    assert log["steps"].sum() == 2
    assert (log["loss"] > 0).all()


def test_train_stops_in_time_goes_on_and_writes_what_it_trained(tiny_llama, another_tiny_llama, tmp_path, monkeypatch):
    waiting = [tiny_llama, another_tiny_llama]

    def load(name):
        return wqlab.models.LanguageModel(waiting.pop(0), Letters(), name, "tiny", [])

    monkeypatch.setattr(wqlab.models, "load", load)
    monkeypatch.setattr(pocket, "load_vision", EfficientNetLite0)
    monkeypatch.setattr("wqlab.training.curriculum.PHASES", ((1.0, {Step("frames", 1): 1.0}),))
    settings = pocket.Settings(steps=3, tokens_per_step=128, rank=2, hidden=32)
    assert not pocket.train(tmp_path, settings, minutes=0.0, device="cpu", workers=0)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 1
    assert pocket.train(tmp_path, settings, device="cpu", workers=0)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3
    assert (tmp_path / "pocket-vlm.safetensors").is_file()
    assert pd.read_csv(tmp_path / "training.csv")["steps"].sum() == 3
