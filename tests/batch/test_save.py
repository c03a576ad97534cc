import errno
import json
import shlex

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest

import wqlab
from wqlab import experiments
from wqlab.batch.save import command, save
from wqlab.errors import OutputError


@pytest.fixture(scope="module")
def drawn():
    result = wqlab.run("alpha_sweep", similarity="prose", alpha=np.float64(4.0))
    return result, wqlab.draw(result)


def test_the_sidecar_holds_what_the_design_asks(drawn, tmp_path):
    files = save(*drawn, tmp_path)
    sidecar = json.loads(files[".json"].read_text())
    wanted = [
        "stem",
        "paper",
        "title",
        "parameters",
        "evidence",
        "inputs",
        "hardware",
        "versions",
        "git_commit",
        "runtime_s",
        "claims",
    ]
    assert not [key for key in wanted if key not in sidecar]
    assert sidecar["command"] == "wqlab figure alpha_sweep -p alpha=4.0 -p similarity=prose"
    assert sidecar["evidence"]["t_low"] == {"kind": "simulated", "source": "Eq. 10 and 11"}
    assert sidecar["evidence"]["tokens"]["kind"] == "recorded"
    assert all(len(i["sha256"]) == 64 for i in sidecar["inputs"])
    assert "recorded" in sidecar["caption"]
    pd.testing.assert_index_equal(pd.read_csv(files[".csv"]).columns, drawn[0].data.columns)


def test_the_same_figure_gives_the_same_bytes(drawn, tmp_path):
    first, second = save(*drawn, tmp_path / "a"), save(*drawn, tmp_path / "b")
    for suffix in (".svg", ".png", ".csv"):
        assert first[suffix].read_bytes() == second[suffix].read_bytes()


def test_none_saves_nothing(drawn):
    assert save(*drawn, None) == {}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_keeps_the_old_figure(drawn, tmp_path, monkeypatch, code):
    files = save(*drawn, tmp_path)
    before = {p.name: p.read_bytes() for p in files.values()}

    def fail(*args, **kwargs):
        raise OSError(code, "No space left on device" if code == errno.ENOSPC else "Read-only file system")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    with pytest.raises(OutputError, match=r"No space|Read-only"):
        save(*drawn, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_failure_between_the_files_leaves_no_new_sidecar(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(
        pd.DataFrame, "to_csv", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(OutputError):
        save(*drawn, tmp_path)
    assert not (tmp_path / "alpha_sweep.json").exists()
    assert not [p for p in tmp_path.iterdir() if ".tmp" in p.name]


def test_the_command_in_a_sidecar_parses_back():
    given = {**experiments.validate("alpha_sweep", {"normalize": "rank", "alpha": 0.5}).model_dump()}
    words = shlex.split(command("alpha_sweep", given))
    assert words == ["wqlab", "figure", "alpha_sweep", "-p", "alpha=0.5", "-p", "normalize=rank"]
