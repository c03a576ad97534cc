import pandas as pd
import pytest

from wqlab.errors import ParameterError
from wqlab.types import Evidence, Result, Value, VQSpec

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


@pytest.mark.parametrize(
    ("text", "bits", "index_bits"),
    [
        ("VQ<8,65536,2>", 4.0, 16),
        ("VQ<8,4096,2>", 3.0, 12),
        ("VQ<4,256,1>", 2.0, 8),
        ("VQ<2, 256, 1>", 4.0, 8),
        ("VQ<3,200,1>", 8 / 3, 8),
    ],
)
def test_vq_specs_read_write_and_count_bits(text, bits, index_bits):
    spec = VQSpec.parse(text, scope="tensor", switch_axes="R")
    assert str(spec) == text.replace(" ", "")
    assert VQSpec.parse(str(spec)) == VQSpec(spec.vector_size, spec.num_entries, spec.num_residuals)
    assert spec.code_bits == pytest.approx(bits)
    assert spec.index_bits == index_bits
    assert (spec.scope, spec.switch_axes) == ("tensor", "R")


@pytest.mark.parametrize("text", ["VQ<8,65536>", "VQ<8,-1,2>", "cq-2", "", "VQ<8,256,1>x"])
def test_other_words_are_no_vq_spec(text):
    with pytest.raises(ParameterError, match="is not VQ<vector_size"):
        VQSpec.parse(text)


@pytest.mark.parametrize("sizes", [(0, 256, 1), (4, 0, 1), (4, 256, 0), (4, True, 1), (4.0, 256, 1)])
def test_vq_sizes_are_whole_numbers_from_one(sizes):
    with pytest.raises(ParameterError, match="is not a whole number, 1 or more"):
        VQSpec(*sizes)
