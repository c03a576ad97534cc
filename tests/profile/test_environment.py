import json
import subprocess
import sys
import types

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
        (["NVIDIA B300"], "other"), (["NVIDIA H100 80GB HBM3"], "h100"), (["NVIDIA L40S"], "l40s"), (["A100-PCIE-40GB"], "a100"),
        (["NVIDIA A40", "NVIDIA L40S"], "a40"),
        # Slices and relatives are others, though their names hold a key.
        (["NVIDIA H200 MIG 1g.18gb"], "other"), (["NVIDIA GH200 480GB"], "other"), (["NVIDIA RTX A4000"], "other"),
        (["NVIDIA A100X"], "other"), (["NVIDIA RTX A1000 Laptop GPU"], "other"), (["NVIDIA GeForce RTX 4090 Laptop GPU"], "other"),
        (["NVIDIA GeForce RTX 4090 D"], "other"), (["unavailable: GPU is lost"], "other"),
    ],
)  # fmt: skip
def test_gpu_keys(monkeypatch, gpus, key):
    monkeypatch.setattr(environment, "hardware", lambda: {"cpu": "c", "cores": 1, "memory_gb": 1.0, "gpus": gpus})
    assert environment.gpu_key() == key


def test_a_gpu_without_a_name_says_why(monkeypatch):
    def lost(index):
        raise RuntimeError("CUDA error: unspecified\nlaunch failure")

    cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_name=lost)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    environment.hardware.cache_clear()
    try:
        assert environment.hardware()["gpus"] == ["unavailable: CUDA error: unspecified launch failure"]
        assert environment.gpu_key() == "other"
        assert environment.hardware_line().startswith("unavailable: ")
    finally:
        environment.hardware.cache_clear()


def test_one_line_has_what_the_record_has(monkeypatch):
    monkeypatch.setattr(environment, "git_commit", lambda: "0123456789abcdef")
    found, line = environment.provenance("x"), environment.provenance_line()
    assert line == f"{environment.hardware_line()}, commit 0123456789ab, {found['date'][:10]}"
