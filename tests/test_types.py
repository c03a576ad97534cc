import pandas as pd
import pytest

from wqlab.types import Evidence, Result, Value

SIMULATED = Evidence(kind="simulated", source="a formula")


@pytest.mark.parametrize(
    ("fields", "lacks"),
    [
        ({"kind": "measured", "source": "x"}, "hardware"),
        ({"kind": "recorded", "source": "x", "hardware": "h"}, "file, commit, date"),
        ({"kind": "simulated", "source": ""}, "source"),
        ({"kind": "guessed", "source": "x"}, "guessed"),
    ],
)
def test_evidence_refuses_gaps(fields, lacks):
    with pytest.raises(ValueError, match=lacks):
        Evidence(**fields)


def test_captions_name_the_kind():
    recorded = Evidence(kind="recorded", source="s", hardware="h", file="f.csv", commit="0123456789abcdef", date="2026-01-02")
    assert recorded.caption() == "recorded 2026-01-02: s, on h (f.csv, commit 012345678)"
    unknown = Evidence(kind="recorded", source="s", hardware="h", file="f.csv", commit="unknown (no git)", date="2026-01-02")
    assert unknown.caption() == "recorded 2026-01-02: s, on h (f.csv, commit unknown)"
    assert SIMULATED.caption().startswith("simulated")


def test_results_refuse_what_has_no_evidence():
    data = pd.DataFrame({"x": [1.0]})
    with pytest.raises(ValueError, match="columns that the table lacks: y"):
        Result("s", {}, data, {"y": SIMULATED})
    with pytest.raises(ValueError, match="needs rows"):
        Result("s", {}, data, {})
    with pytest.raises(ValueError, match="needs rows"):
        Result("s", {}, data[:0], {"x": SIMULATED})
    with pytest.raises(ValueError, match="no evidence"):
        Result("s", {}, data, {"x": SIMULATED}, values={"v": Value(1.0, "1", "z")})
    with pytest.raises(ValueError, match="finite"):
        Value(float("nan"), "1", "x")
