import contextlib
import os

import pytest
import torch

from wqlab.evals.threads import free_cores, polite_threads


@pytest.mark.parametrize(("load", "expected"), [(0.1, 4), (1.6, 2), (9.0, 1)])
def test_busy_cores_are_left_alone(monkeypatch, load, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    assert free_cores() == expected


def test_the_setting_comes_back_after_an_error(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("wqlab.evals.threads.free_cores", lambda: 1)
    with contextlib.suppress(RuntimeError), polite_threads() as threads:
        assert threads == torch.get_num_threads() == 1
        raise RuntimeError
    assert torch.get_num_threads() == before
