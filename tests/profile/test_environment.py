import json
import subprocess

import pytest

from wqlab import paths, records
from wqlab.profile import environment


def test_provenance_is_complete_and_valid_json():
    found = json.loads(records.dump_json(environment.provenance("wqlab bench x")))
    assert set(found) == {"hardware", "versions", "git_commit", "date", "command"}
    assert found["command"] == "wqlab bench x"
    assert found["hardware"]["cores"] >= 1
    assert {"python", "torch", "transformers", "wqlab"} <= set(found["versions"])


def test_the_commit_is_gits_and_changes_of_code_are_marked(tmp_path, monkeypatch):
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "wqlab").mkdir()
    (tmp_path / "figures").mkdir()
    (tmp_path / "wqlab" / "a.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", "-A")
    git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "one")
    monkeypatch.setattr(paths, "checkout", lambda: tmp_path)
    commit = git("rev-parse", "HEAD")
    assert environment.git_commit() == commit
    (tmp_path / "figures" / "new.svg").write_text("what a run writes is no change of code")
    assert environment.git_commit() == commit
    (tmp_path / "wqlab" / "a.py").write_text("a = 2\n")
    assert environment.git_commit() == commit + "+changes"


def test_outside_a_checkout_the_commit_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "checkout", lambda: None)
    assert environment.git_commit().startswith("wheel ")
    monkeypatch.setattr(paths, "checkout", lambda: tmp_path)
    assert environment.git_commit() == "unknown (no git)"


@pytest.mark.parametrize(
    ("gpus", "key"),
    [
        ([], "cpu"), (["NVIDIA H200"], "h200"), (["NVIDIA GeForce RTX 4090"], "rtx4090"), (["NVIDIA A800-SXM4-80GB"], "a800"),
        (["NVIDIA B300"], "other"),
    ],
)  # fmt: skip
def test_gpu_keys(monkeypatch, gpus, key):
    monkeypatch.setattr(environment, "hardware", lambda: {"cpu": "c", "cores": 1, "memory_gb": 1.0, "gpus": gpus})
    assert environment.gpu_key() == key
