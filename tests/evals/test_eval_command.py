"""`wqlab eval pocketbench` on random weights: its words, its JSON, its table and its one-line errors."""

import json

import pytest

from wqlab import cli
from wqlab.evals import paired, pocketbench
from wqlab.models import fetch, pocket, shipped

SMALL = ("--limit", "2", "--frames", str(pocketbench.MIN_FRAMES), "--device", "cpu")


@pytest.fixture
def command(loaded, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(pocket, "load", lambda dtype: loaded)
    monkeypatch.setattr(shipped, "verify", lambda path: "0" * 64)
    monkeypatch.setattr(fetch, "fetch", lambda names, progress: {})

    def run(*words):
        with pytest.raises(SystemExit) as done:
            cli.main(["eval", "pocketbench", *words, "--out", str(tmp_path)])
        captured = capsys.readouterr()
        return done.value.code, captured.out, captured.err

    return run


def test_json_is_one_object(command, tmp_path):
    words = "--method rtn --num-bits 2 --granularity window --protocol multi_turn --split easy --seed 7"
    code, out, err = command(*words.split(), *SMALL, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["n"], result["protocol"], result["seed"], result["granularity"]) == (2, "multi_turn", 7, "window")
    assert {"accuracy", "tasks", "bits_per_element", "bytes_held", "bytes_fp16"} <= set(result)
    assert all(len(result[f"{name}_interval"]) == 2 for name in paired.METRICS)
    assert result == json.loads(next(tmp_path.glob("*/result.json")).read_text())


def test_the_table_has_every_task_and_says_what_it_is(command):
    code, out, _ = command("--method", "rtn", "--num-bits", "4", *SMALL)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["all", "action_localization", "action_sequence"]
    assert "rtn int4 window_channel 32, cache_then_ask, easy split, seed 0, 8 frames" in out
    assert "5.00 bits per element with metadata" in out
    assert "one answer of 2 is 50.00%" in out
    code, out, _ = command(*SMALL)
    assert "fp16, cache_then_ask" in out
    assert "16.00 bits per element" in out
    assert "visual tokens zeroed" in command("--blind", *SMALL)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "rtnn"), "unknown method 'rtnn': did you mean rtn"),
        (("--method", "rtn"), "method rtn needs num_bits: one of 2, 4, 8"),
        (("--protocol", "cache_and_ask"), "unknown protocol 'cache_and_ask': did you mean cache_then_ask"),
        (("--split", "medium"), "unknown split 'medium'"),
        (("--granularity", "windows", "--method", "rtn", "--num-bits", "2"), "granularity = 'windows' is not one of"),
        (("--frames", "500"), "at most 15 frames fit"),
        (("--limit", "0"), "limit = 0"),
        (("--device", "tpux"), "device 'tpux' is refused"),
    ],
)
def test_errors_are_one_line(command, tmp_path, words, message):
    code, out, err = command(*words)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_the_trained_weights_it_says_how_to_get_them(command, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(shipped, "weights_path", lambda: tmp_path / "pocket-vlm.safetensors")
    code, _, err = command(*SMALL)
    assert code == 1
    assert "pocket-vlm.safetensors is not in" in err
    assert "train" in err
