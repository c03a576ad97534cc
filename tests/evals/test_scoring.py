"""Whole runs on random weights: what the metrics must show by construction, resuming, damage and refusals."""

import copy
import json
import logging

import numpy as np
import pytest
import torch

from wqlab import progress
from wqlab.errors import MissingPartError, NonFiniteError, OutputError, ParameterError, UnknownNameError
from wqlab.evals import paired, pocketbench
from wqlab.evals.scoring import Setting, choose_setting, evaluate, rows, score_settings, summarise_setting
from wqlab.models.pocket import prompt

INT8, INT4, INT2 = (Setting("rtn", bits) for bits in (8, 4, 2))
FRAMES = pocketbench.MIN_FRAMES
TOKENS = 64 * FRAMES
SMALL = {"limit": 4, "num_frames": FRAMES, "batch_size": 2}
SETTING_WORDS = ("method", "num_bits", "granularity", "window_size", "sink_windows", "policy", "order", "alpha")
LOG_PROBS = [f"log_prob_{i}" for i in range(4)]


@pytest.fixture
def asked(loaded, monkeypatch):
    """Count the videos that are drawn."""
    drawn = []
    original = pocketbench.draw
    monkeypatch.setattr(pocketbench, "draw", lambda items, device: drawn.extend(i.index for i in items) or original(items, device))
    return drawn


def scores(table, label):
    return table[table["setting"] == label][LOG_PROBS].to_numpy()


def test_fewer_bits_lose_more_and_full_precision_loses_nothing(loaded):
    table = score_settings(loaded, [INT8, INT4, INT2], **SMALL)
    assert table.groupby("setting", sort=False)["index"].apply(list).to_dict() == {
        s.label: [0, 1, 2, 3] for s in (Setting(), INT8, INT4, INT2)
    }
    kl = table.groupby("setting")["kl"].mean()
    assert kl["fp16"] == 0
    assert 0 < kl[INT8.label] < 1e-5 < kl[INT4.label] < kl[INT2.label]
    full = table[table["setting"] == "fp16"]
    assert (full["flip_rate"] == 0).all()
    assert (full["margin_difference"] == 0).all()
    bits = table.groupby("setting")["bits_per_element"].unique().to_dict()
    assert bits == {"fp16": [16.0], INT8.label: [9.0], INT4.label: [5.0], INT2.label: [3.0]}  # codes and 2 x 16 bits per 32
    held = 2 * 2 * 2 * 16 * TOKENS * 2  # layers, K and V, heads, head_dim, visual tokens, bytes
    assert set(full["bytes_held"]) == set(table["bytes_fp16"]) == {held}


def test_sinks_and_coarser_groups_change_the_bytes(loaded):
    settings = [Setting("rtn", 2, sink_windows=2), Setting("rtn", 2, "window"), Setting("rtn", 2, window_size=100)]
    bits = score_settings(loaded, settings, **SMALL | {"limit": 1}).set_index("setting")["bits_per_element"]
    assert bits[settings[0].label] == pytest.approx(3 + 13 * 2 * 32 / TOKENS)
    assert bits[settings[1].label] == 2 + 32 / (32 * 16 * 2)
    rest = TOKENS % 100  # no whole window, so in full precision
    assert bits[settings[2].label] == pytest.approx(((TOKENS - rest) * (2 + 32 / 100) + rest * 16) / TOKENS)


@pytest.mark.parametrize("protocol", ["cache_then_ask", "paper_literal", "multi_turn"])
def test_batches_and_company_change_nothing(loaded, protocol):
    alone = score_settings(loaded, [INT2], protocol=protocol, **SMALL | {"batch_size": 1})
    together = score_settings(loaded, [INT8, INT2], protocol=protocol, **SMALL | {"batch_size": 3})
    for label in ("fp16", INT2.label):
        np.testing.assert_allclose(scores(alone, label), scores(together, label), atol=2e-4)


def test_a_one_letter_answer_never_sees_the_quantized_cache(loaded, monkeypatch):
    """WindowQuant, read literally: the first token is the full-precision model's, whatever the bits."""
    first = lambda tokenizer, option: [3 + "abcdefgh".index("abcdefgh"[len(option) % 8])]  # noqa: E731
    monkeypatch.setattr(prompt, "answer_ids", first)
    literal = score_settings(loaded, [INT2], protocol="paper_literal", **SMALL)
    assert np.array_equal(scores(literal, "fp16"), scores(literal, INT2.label))
    seen = score_settings(loaded, [INT2], protocol="cache_then_ask", **SMALL)
    assert float(np.abs(scores(seen, "fp16") - scores(seen, INT2.label)).max()) > 1e-2
    # The same up to the rounding of a cache that is held in float16.
    np.testing.assert_allclose(scores(literal, "fp16"), scores(seen, "fp16"), atol=2e-3)


def test_the_end_token_of_a_longer_answer_does_see_it(loaded):
    table = score_settings(loaded, [INT2], protocol="paper_literal", **SMALL)
    assert float(np.abs(scores(table, "fp16") - scores(table, INT2.label)).min()) > 0


def test_multi_turn_scores_the_question_of_the_other_protocols(loaded):
    tables = [score_settings(loaded, [], protocol=p, **SMALL) for p in ("cache_then_ask", "multi_turn")]
    assert tables[0][["task", "answer"]].equals(tables[1][["task", "answer"]])
    assert float(np.abs(scores(tables[0], "fp16") - scores(tables[1], "fp16")).max()) > 1e-3


def test_blind_answers_depend_on_the_text_alone(loaded, asked, monkeypatch):
    blind, seen = score_settings(loaded, [], blind=True, **SMALL), score_settings(loaded, [], **SMALL)
    assert asked == [0, 1, 2, 3], "a video is drawn that nobody looks at"
    monkeypatch.setattr(loaded.model, "get_video_features", lambda frames: torch.zeros(len(frames), TOKENS, 48))
    np.testing.assert_array_equal(scores(blind, "fp16"), scores(score_settings(loaded, [], **SMALL), "fp16"))
    assert float(np.abs(scores(blind, "fp16") - scores(seen, "fp16")).max()) > 1e-2


def test_full_precision_is_one_setting_whatever_else_is_said(loaded):
    table = score_settings(loaded, [Setting("fp16", 16, "window"), Setting(), INT2, INT2], **SMALL | {"limit": 1})
    assert list(table["setting"]) == ["fp16", INT2.label]


def test_nan_is_named(loaded, monkeypatch):
    monkeypatch.setattr(rows, "option_log_probs", lambda logits, options: torch.full((1, 4), torch.nan))
    with pytest.raises(NonFiniteError, match="NaN or infinite; run it in bfloat16"):
        score_settings(loaded, [], **SMALL)


def test_evaluate_reports_what_the_table_says(loaded, tmp_path):
    result = evaluate(loaded, INT2, protocol="paper_literal", seed=5, out=tmp_path, **SMALL)
    assert json.loads((tmp_path / result["folder"] / "result.json").read_text()) == result
    assert (result["n"], result["one_answer"], result["method"], result["num_bits"]) == (4, 0.25, "rtn", 2)
    assert (result["protocol"], result["split"], result["seed"], result["num_frames"]) == ("paper_literal", "easy", 5, FRAMES)
    table = score_settings(loaded, [INT2], protocol="paper_literal", seed=5, **SMALL)
    expected = summarise_setting(table, INT2.label)
    for name in paired.METRICS:
        assert result[name] == pytest.approx(expected[name], abs=1e-9)
        low, high = result[f"{name}_interval"]
        assert low <= result[name] <= high
    assert sum(task["n"] for task in result["tasks"].values()) == 4
    assert set(result["tasks"]) == set(table["task"])
    assert result["generator"] == {"version": pocketbench.VERSION, "sha256": pocketbench.generator_hash()}
    assert result["weights"] == {"tiny/model.safetensors": "0" * 64}
    assert (result["bits_per_element"], result["bytes_fp16"], result["bytes_held"]) == (3.0, 256 * TOKENS, 48 * TOKENS)
    assert result["runtime_s"] > 0
    assert {"torch", "transformers", "wqlab"} <= set(result["versions"])


def test_an_interrupted_run_is_continued(loaded, asked, tmp_path):
    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), progress.listening(stop):
        evaluate(loaded, INT2, out=tmp_path, **SMALL)
    assert asked == [0, 1]
    resumed = evaluate(loaded, INT2, out=tmp_path, **SMALL)
    assert (asked, resumed["kept"], resumed["notes"]) == ([0, 1, 2, 3], 2, [])
    again = evaluate(loaded, INT2, out=tmp_path, **SMALL)
    assert (len(asked), again["kept"]) == (4, 4)
    longer = evaluate(loaded, INT2, out=tmp_path, **SMALL | {"limit": 6})
    assert (asked[4:], longer["n"], longer["kept"]) == ([4, 5], 6, 4)
    shorter = evaluate(loaded, INT2, out=tmp_path, **SMALL)
    assert {k: v for k, v in shorter.items() if k != "git_commit"} == {k: v for k, v in again.items() if k != "git_commit"}
    assert len(list(tmp_path.iterdir())) == 1
    evaluate(loaded, INT4, out=tmp_path, **SMALL | {"limit": 1})
    loaded.inputs[0] = type(loaded.inputs[0])("tiny/model.safetensors", "1" * 64)
    evaluate(loaded, INT2, out=tmp_path, **SMALL | {"limit": 1})
    assert len(list(tmp_path.iterdir())) == 3, "other settings and other weights are other runs"


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[1][:40], *lines[2:]],
        lambda lines: [lines[0], b"\xff\x00 no text", *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"fp16"', b'"fp17"'), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"seconds":', b'"seconds":1e'), *lines[2:]],
    ],
)
def test_damaged_lines_are_named_kept_and_answered_again(loaded, asked, tmp_path, caplog, damage):
    before = evaluate(loaded, INT2, out=tmp_path, **SMALL)
    (journal,) = tmp_path.glob("*/answers.jsonl")
    journal.write_bytes(b"\n".join(damage(journal.read_bytes().splitlines())))
    damaged = journal.read_bytes()
    with caplog.at_level(logging.WARNING):
        after = evaluate(loaded, INT2, out=tmp_path, **SMALL)
    assert (asked[4:], after["kept"]) == ([1], 3)
    aside = journal.with_name("answers.jsonl.damaged-1")
    assert aside.read_bytes() == damaged
    assert f"{journal}: 1 damaged line" in caplog.text
    assert aside.name in after["notes"][0]
    assert {k: after[k] for k in ("accuracy", "n", "flip_rate")} == {k: before[k] for k in ("accuracy", "n", "flip_rate")}
    assert after["kl"] == pytest.approx(before["kl"], abs=1e-5)
    assert evaluate(loaded, INT2, out=tmp_path, **SMALL)["notes"] == []


def test_a_damaged_result_is_kept(loaded, tmp_path):
    first = evaluate(loaded, out=tmp_path, **SMALL)
    (path,) = tmp_path.glob("*/result.json")
    path.write_text('{"accuracy": 0.')
    second = evaluate(loaded, out=tmp_path, **SMALL)
    assert path.with_name("result.json.damaged-1").read_text() == '{"accuracy": 0.'
    assert second["notes"] == [f"{path} was damaged; it is kept as result.json.damaged-1"]
    assert (json.loads(path.read_text()), second["accuracy"]) == (second, first["accuracy"])


NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_bfloat16_holds_bfloat16(loaded, device):
    exact = score_settings(loaded, [INT8, INT2], **SMALL)
    loaded.model = copy.deepcopy(loaded.model).to(torch.bfloat16)
    table = score_settings(loaded, [INT8, INT2], device=device, **SMALL)
    assert table.attrs["run"]["dtype"] == "torch.bfloat16"
    np.testing.assert_allclose(scores(table, "fp16"), scores(exact, "fp16"), atol=0.3)
    kl = table.groupby("setting")["kl"].mean()
    assert 0 == kl["fp16"] < kl[INT8.label] < kl[INT2.label]
    assert table.groupby("setting")["bits_per_element"].first().to_dict() == {"fp16": 16, INT8.label: 9, INT2.label: 3}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "rtm"}, UnknownNameError, "unknown method 'rtm': did you mean rtn"),
        ({"method": "fp61"}, UnknownNameError, "did you mean fp16"),
        ({"method": "rtn"}, ParameterError, "rtn needs num_bits: one of 2, 4, 8"),
        ({"method": "rtn", "num_bits": 3}, ParameterError, "num_bits = 3"),
        ({"method": "rtn", "num_bits": 2, "granularity": "token"}, ParameterError, "granularity = 'token'"),
        ({"method": "rtn", "num_bits": 2, "window_size": 0}, ParameterError, "window_size = 0"),
        ({"method": "rtn", "num_bits": 2, "sink_windows": -1}, ParameterError, "sink_windows = -1"),
        ({"num_bits": 2}, ParameterError, "num_bits = 2; name a quantizer"),
        ({"method": "kivi", "num_bits": 2, "policy": "own"}, ParameterError, "policy = 'own' is refused"),
        ({"method": "kivi", "num_bits": 2, "policy": "published", "sink_windows": 1}, ParameterError, "has its own"),
        ({"method": "windowquant", "alpha": 0}, ParameterError, "alpha = 0.0 is refused"),
        ({"method": "windowquant", "order": "best"}, ParameterError, "order = 'best' is refused: it must be one of plan, permuted"),
        ({"method": "transformers-fp8", "num_bits": 4}, ParameterError, "fp8 holds 8 bits"),
        ({"protocol": "cache_than_ask"}, UnknownNameError, "unknown protocol 'cache_than_ask': did you mean cache_then_ask"),
        ({"split": "heard"}, UnknownNameError, "unknown split 'heard': did you mean hard"),
        ({"limit": 0}, ParameterError, "limit = 0 is no number of questions"),
        ({"batch_size": 0}, ParameterError, "batch_size = 0 is no number of videos"),
        (
            {"num_frames": 100},
            ParameterError,
            r"6,400 visual tokens, and up to \d+ of text .* 1,024 tokens, so at most 15 frames fit",
        ),
        ({"device": "gpu"}, ParameterError, "device 'gpu' is refused: use cpu or cuda"),
        ({"num_frames": 0}, ParameterError, "num_frames = 0"),
    ],
)
def test_refusals_come_before_any_work(loaded, asked, tmp_path, options, error, message):
    words = {name: value for name, value in options.items() if name in SETTING_WORDS}
    rest = {name: value for name, value in options.items() if name not in SETTING_WORDS}
    with pytest.raises(error, match=message):
        evaluate(loaded, choose_setting(**words), out=tmp_path, **{"limit": 4, "num_frames": FRAMES} | rest)
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_no_cuda_and_no_place_to_write(loaded, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(MissingPartError, match="device cuda: torch sees no CUDA device here; use cpu"):
            evaluate(loaded, device="cuda", out=tmp_path, **SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to"):
        evaluate(loaded, out=tmp_path / "file", **SMALL)
