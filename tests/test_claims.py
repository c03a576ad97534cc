"""The ledger: schema errors, every verdict, like compared with like, and tolerances older than measurements."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqlab import claims, experiments, paths
from wqlab.claims import schema
from wqlab.claims.schema import Claim, parse
from wqlab.errors import DamagedFileError, UnknownNameError

KEYS = ["id", "paper", "where", "statement", "paper_value", "our_value", "unit", "evidence"]
KEYS += ["verdict", "command", "minutes", "hardware", "reason"]


def entry(**changes: Any) -> dict[str, Any]:
    base = {
        "id": "a-claim",
        "where": "Sect. 1",
        "statement": "a statement",
        "value": 2.0,
        "unit": "GB",
        "tolerance": 0.1,
        "scope": "same_setup",
        "evidence": {"stem": "kv_memory", "value": "ours"},
        "hardware": "any computer",
    }
    merged = {**base, **changes}
    return {k: v for k, v in merged.items() if v != "absent"}


def claim(**changes: Any) -> Claim:
    return Claim(**{"paper": "windowquant", **entry(**changes)})


def directional(op: str, than: float | str, **changes: Any) -> Claim:
    return claim(value="absent", tolerance="absent", expect=[{"op": op, "than": than}], **changes)


def write_sidecar(folder: Path, stated: dict[str, tuple[float, str, str]], **changes: Any) -> Path:
    content = {
        "stem": "kv_memory",
        "parameters": experiments.validate("kv_memory", {}).model_dump(mode="json"),
        "quick": False,
        "values": {name: {"value": v, "unit": unit, "evidence": kind} for name, (v, unit, kind) in stated.items()},
        "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gb": 8.0, "gpus": []},
        "git_commit": "0" * 40,
        "command": "wqlab reproduce kv_memory --out x",
        "runtime_s": 90.0,
        **changes,
    }
    path = folder / "kv_memory.json"
    path.write_text(json.dumps(content))
    return path


def verdict_of(one: Claim, folder: Path, ours: float, unit: str = "GB", kind: str = "measured", **changes: Any) -> claims.Judged:
    write_sidecar(folder, {"ours": (ours, unit, kind), "other": (1.0, "GB", "measured")}, **changes)
    return claims.judge(one, folder)


# ---------------------------------------------------------------------------------------------------------------- schema


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": "absent"}, "needs a tolerance"),
        ({"value": "absent", "expect": [{"op": ">", "than": 1}]}, "needs a value"),
        ({"unit": "absent"}, "needs a unit"),
        ({"scope": "same_planet"}, "scope = 'same_planet'"),
        ({"verdict": "reproduced"}, "verdict"),
        ({"expect": [{"op": "~", "than": 1}]}, "expect.0.op = '~'"),
        ({"accepts": ["paper"]}, "accepts.0 = 'paper'"),
        ({"evidence": None}, "what it needs"),
        ({"scope": "proxy"}, "only show a direction"),
        ({"value": "absent", "tolerance": "absent"}, "something to compare with"),
        ({"evidence": {"cell": "a | b | c"}}, "inner: true"),
        ({"tolerance": -0.1}, "tolerance = -0.1"),
        ({"value": float("nan")}, "value = nan"),
        ({"id": "Not An Id"}, "id = 'Not An Id'"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_named(changes: dict[str, Any], message: str) -> None:
    text = json.dumps({"paper": "windowquant", "claims": [entry(**changes)]})  # JSON is YAML
    with pytest.raises(DamagedFileError) as error:
        parse(text.replace("NaN", ".nan"), "windowquant.yml", "windowquant")
    assert message in str(error.value)
    assert str(error.value).startswith(f"windowquant.yml, entry {changes.get('id', 'a-claim')}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "a: [", "paper: other\nclaims: []", "paper: p\nclaims: {}", "paper: p\nclaims: [3]", "- 1"])
def test_a_file_that_is_no_ledger_is_named(text: str) -> None:
    with pytest.raises(DamagedFileError, match=r"p\.yml"):
        parse(text, "p.yml", "p")


def test_two_entries_with_one_id_are_refused() -> None:
    with pytest.raises(DamagedFileError, match=r"p\.yml.*a-claim"):
        parse(json.dumps({"paper": "p", "claims": [entry(), entry()]}), "p.yml", "p")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evidence": {"stem": "kv_memroy", "value": "x"}}, "did you mean kv_memory"),
        ({"expect": [{"op": ">", "than": "windowquant_table8 | full precision | memroy"}]}, "did you mean"),
        ({"inner": True, "evidence": {"cell": "no_such_file | a | b"}}, "no_such_file"),
        ({"inner": True, "evidence": {"cell": "only_a_file"}}, "only_a_file"),
    ],
)
def test_stems_and_cells_must_exist(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.yml"
    path.write_text(json.dumps({"paper": "p", "claims": [entry(**changes)]}))
    with pytest.raises(DamagedFileError, match=r"p\.yml, entry a-claim") as error:
        schema.read(path)
    assert message in str(error.value)


def test_an_unknown_paper_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean windowquant"):
        claims.ledger("windowqant")


# --------------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("one", "ours", "verdict"),
    [
        (claim(), 2.2, "reproduced"),
        (claim(), 2.21, "contradicted"),
        (claim(scope="same_mechanism"), 1.9, "reproduced"),
        (claim(expect=[{"op": ">", "than": 1}]), 3.0, "direction_holds"),
        (claim(expect=[{"op": ">", "than": 1}, {"op": "<", "than": 2.5}]), 3.0, "contradicted"),
        (claim(expect=[{"op": ">", "than": "other"}]), 3.0, "direction_holds"),
        (directional(">", 1), 1.5, "reproduced"),
        (directional(">", 1), 1.0, "contradicted"),
        (directional(">", 1, scope="same_mechanism"), 1.5, "direction_holds"),
        (directional("<", "other", scope="proxy"), 0.5, "direction_holds_on_proxy"),
        (directional("<", "other", scope="proxy"), 1.5, "direction_fails_on_proxy"),
        (claim(scope="proxy", expect=[{"op": ">", "than": 1}]), 2.0, "direction_holds_on_proxy"),
        (claim(inner=True), 5.0, "inconsistent_in_paper"),
        (claim(inner=True), 2.0, "not_testable_here"),
        (directional(">=", 4, inner=True), 3.9, "inconsistent_in_paper"),
        (directional("!=", 4, inner=True), 3.9, "not_testable_here"),
    ],
)
def test_each_rule_of_the_verdict_table(tmp_path: Path, one: Claim, ours: float, verdict: str) -> None:
    judged = verdict_of(one, tmp_path, ours)
    assert judged.verdict == verdict, judged.reason
    assert judged.our_value == ours
    assert (judged.minutes, judged.hardware) == (1.5, "2 cores of Some CPU")  # of the run, not of the entry
    assert judged.command == "wqlab reproduce kv_memory --out x"
    assert judged.evidence == "measured: figures/kv_memory.json, ours"


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 2))
def test_within_is_a_fraction_of_the_printed_value(value: float, ours: float, tolerance: float) -> None:
    one = claim(value=value, tolerance=tolerance)
    assert one.within(value)
    if one.within(ours):
        assert abs(ours - value) <= tolerance * abs(value) * 1.001
    else:
        assert abs(ours - value) > tolerance * abs(value)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"unit": "GiB"}, "ours is in GiB, the claim in GB"),
        ({"kind": "simulated"}, "judged by measured or recorded values only"),
        ({"kind": "paper"}, "judged by measured or recorded values only"),
        ({"quick": True}, "quick run"),
        ({"stem": "other"}, "sidecar of 'other'"),
        ({"parameters": {"seconds": 5.0}}, "seconds = 5.0, not 30.0"),
        ({"values": {}}, "no value 'ours'"),
        ({"values": {"ours": {"value": None, "unit": "GB", "evidence": "measured"}}}, "damaged"),
        ({"runtime_s": None}, "damaged"),
    ],
)
def test_only_like_is_compared_with_like(tmp_path: Path, keywords: dict[str, Any], reason: str) -> None:
    judged = verdict_of(claim(), tmp_path, 2.0, **keywords)
    assert judged.verdict == "not_testable_here"
    assert reason in judged.reason
    assert judged.our_value is None
    assert judged.hardware == "any computer"  # of the entry


def test_simulated_values_judge_where_the_entry_says_so(tmp_path: Path) -> None:
    one = claim(accepts=["simulated"])
    assert verdict_of(one, tmp_path, 2.0, kind="simulated").verdict == "reproduced"
    assert verdict_of(one, tmp_path, 2.0, kind="measured").verdict == "not_testable_here"


def test_the_other_value_of_a_direction_obeys_the_rule_too(tmp_path: Path) -> None:
    one = directional(">", "other")
    write_sidecar(tmp_path, {"ours": (2.0, "GB", "measured"), "other": (1.0, "GB", "simulated")})
    assert claims.judge(one, tmp_path).verdict == "not_testable_here"


def test_a_missing_or_damaged_sidecar_says_what_to_run(tmp_path: Path) -> None:
    assert claims.judge(claim(), tmp_path).reason == "no figures/kv_memory.json: run wqlab reproduce kv_memory"
    for content in ("", "{", "[]", "3", "{}", '{"stem": "kv_memory"}'):
        (tmp_path / "kv_memory.json").write_text(content)
        judged = claims.judge(claim(), tmp_path)
        assert judged.verdict == "not_testable_here"
        assert "damaged" in judged.reason
        assert "run wqlab reproduce kv_memory" in judged.reason
    (tmp_path / "kv_memory.json").write_bytes(b"\xff\xfe\x00")
    assert "damaged" in claims.judge(claim(), tmp_path).reason


# ------------------------------------------------------------------------------------------------------- the ledger itself


def test_every_row_has_the_agreed_keys_and_a_known_verdict(tmp_path: Path) -> None:
    rows = claims.judge_all(figures=tmp_path)
    assert len(rows) >= 50
    for row in rows:
        assert list(row) == KEYS
        assert row["verdict"] in claims.VERDICTS
        assert row["reason"]
    assert json.loads(claims.to_json(rows)) == rows
    assert all(r["verdict"] in ("not_testable_here", "inconsistent_in_paper") for r in rows)  # nothing was measured


def test_bytes_of_the_introduction_are_judged_from_the_sidecar(tmp_path: Path) -> None:
    result = experiments.run("kv_memory")
    write_sidecar(tmp_path, {n: (v.value, v.unit, result.evidence[v.column].kind) for n, v in result.values.items()})
    verdicts = {row["id"]: row["verdict"] for row in claims.judge_all("windowquant", tmp_path)}
    assert verdicts["intro-weights"] == "reproduced"
    assert verdicts["intro-visual-kv"] == "contradicted"
    assert verdicts["fig1b-bottleneck-moves"] == "reproduced"
    for inner in [i for i in verdicts if i.startswith("inner-")]:
        assert verdicts[inner] == "inconsistent_in_paper", inner


def test_simulated_values_judge_only_arithmetic() -> None:
    allowed = {c.stem for c in claims.ledger() if "simulated" in c.accepts}
    assert allowed <= {"kv_memory", "alpha_sweep"} or claims.papers() != ["windowquant"]
    assert {c.scope for c in claims.ledger("windowquant")} == {"same_setup", "same_mechanism", "proxy"}


def test_claims_of_a_stem_are_those_that_its_sidecar_judges() -> None:
    assert "intro-visual-kv" in claims.claims_of("kv_memory")
    assert claims.claims_of("no_such_stem") == []


def test_pages_escape_what_they_show(tmp_path: Path) -> None:
    rows = claims.judge_all(figures=tmp_path)
    rows[0] = {**rows[0], "statement": "<script>x</script> & more", "reason": "[bold]no markup[/bold]"}
    page = claims.to_html(rows)
    assert "<script>" not in page
    assert "&lt;script&gt;x&lt;/script&gt; &amp; more" in page
    assert "http" not in page  # nothing is loaded from elsewhere
    assert all(f'id="{row["id"]}"' in page for row in rows)
    from rich.console import Console

    written = io.StringIO()
    Console(file=written, width=500).print(claims.table(rows))
    shown = written.getvalue()
    assert "[bold]no markup[/bold]" in shown
    counts = Counter(row["verdict"] for row in rows)
    assert f"{counts['inconsistent_in_paper']} inconsistent_in_paper" in shown


def test_committed_sidecars_hold_the_values_that_the_ledger_names() -> None:
    checked = 0
    for one in claims.ledger():
        path = claims.figures_dir() / f"{one.stem}.json"
        if one.stem is None or not path.is_file():
            continue
        reason = claims.judge(one, claims.figures_dir()).reason
        assert "like is compared" not in reason, one.id
        assert "has no value" not in reason, one.id
        assert "values only" not in reason, one.id
        checked += 1
    if not checked:
        pytest.skip("no figure has been made in this checkout yet")


# ---------------------------------------------------------------------------------------- a tolerance before a measurement


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=repo, capture_output=True, text=True, check=True).stdout.strip()


def commit_ledger(repo: Path, **changes: Any) -> str:
    path = repo / "data" / "claims" / "windowquant.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"paper": "windowquant", "claims": [entry(**changes)]}))
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", "ledger")
    return git(repo, "rev-parse", "HEAD")


def test_order_of_tolerance_and_measurement(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code").write_text("1")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "before the ledger")
    early = git(tmp_path, "rev-parse", "HEAD")
    first = commit_ledger(tmp_path, tolerance=0.1)
    reworded = commit_ledger(tmp_path, tolerance=0.1, statement="other words")
    loosened = commit_ledger(tmp_path, tolerance=0.5)

    now = claim(tolerance=0.5)
    assert claims.tolerance_commit(now, tmp_path) == loosened
    assert claims.committed_before(now, loosened, tmp_path).holds is True
    after = claims.committed_before(now, reworded + "+changes", tmp_path)
    assert after.holds is False  # loosened once the measurement was known
    assert "after it was measured" in after.reason

    old = claim(tolerance=0.1)  # the working tree went back, and nobody committed that
    assert claims.committed_before(old, loosened, tmp_path).holds is False
    back = commit_ledger(tmp_path, tolerance=0.1)
    assert claims.tolerance_commit(old, tmp_path) == back  # counts from its return, not from its first appearance
    assert claims.committed_before(old, first, tmp_path).holds is False

    renamed = commit_ledger(tmp_path, tolerance=0.1, statement="again", hardware="a GPU")
    assert claims.committed_before(old, renamed, tmp_path).holds is True
    assert claims.committed_before(old, early, tmp_path).holds is False
    assert claims.committed_before(claim(id="never-seen"), renamed, tmp_path).holds is False


@pytest.mark.parametrize(
    "change", [{"value": 3.0}, {"tolerance": 0.2}, {"scope": "same_mechanism"}, {"expect": [{"op": ">", "than": 1}]}]
)
def test_each_part_of_the_rule_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    git(tmp_path, "init", "-q")
    measured = commit_ledger(tmp_path)
    commit_ledger(tmp_path, **change)
    assert claims.committed_before(claim(**change), measured, tmp_path).holds is False


def test_git_that_cannot_tell_says_why(tmp_path: Path) -> None:
    outside = claims.committed_before(claim(), "0" * 40, tmp_path)
    assert outside.holds is None
    repo, clone = tmp_path / "repo", tmp_path / "clone"
    repo.mkdir()
    git(repo, "init", "-q")
    first = commit_ledger(repo)
    (repo / "code").write_text("1")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "measured here")
    unknown = claims.committed_before(claim(), "1" * 40, repo)
    assert unknown.holds is None
    assert "not in this clone" in unknown.reason
    assert claims.committed_before(claim(), "wheel 0.1.0", repo).holds is None
    git(tmp_path, "clone", "-q", "--depth", "1", repo.as_uri(), str(clone))
    assert claims.committed_before(claim(), first, clone).holds is None
    assert claims.committed_before(claim(), git(clone, "rev-parse", "HEAD"), clone).holds is True


def test_no_tolerance_is_younger_than_the_measurement_that_it_judges() -> None:
    root = paths.checkout()
    if root is None:
        pytest.skip("an installed wheel has no history")
    untold, wrong, told = [], [], 0
    for one in claims.ledger():
        path = root / "figures" / f"{one.stem}.json"
        if one.stem is None or not path.is_file():
            continue
        order = claims.committed_before(one, json.loads(path.read_text())["git_commit"], root)
        if order.holds is None:
            untold.append(order.reason)
        elif order.holds:
            told += 1
        else:
            wrong.append(order.reason)
    assert not wrong
    if not told:
        pytest.skip(untold[0] if untold else "no figure has been made in this checkout yet")


def test_every_contradiction_of_windowquant_is_an_entry_that_finds_it() -> None:
    with (paths.shipped("data") / "paper" / "contradictions.csv").open(encoding="utf-8", newline="") as file:
        listed = [row for row in csv.DictReader(file) if row["cell"].startswith("windowquant")]
    for row in listed:
        entries = [c for c in claims.ledger("windowquant") if c.inner and getattr(c.evidence, "cell", None) == row["cell"]]
        entries = [c for c in entries if any(e.than == row["against"] and e.op == row["should"] for e in c.expect)]
        assert [claims.judge(c, claims.figures_dir()).verdict for c in entries] == ["inconsistent_in_paper"], row
