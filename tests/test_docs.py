"""Numbers and names in the documents are those of the project."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from wqlab import claims, cli, experiments

ROOT = Path(__file__).parents[1]
STATED = re.compile(r"`(\w+)\.(\w+)` = (-?[\d.,]*\d)")


def stated():
    return STATED.findall((ROOT / "docs" / "findings.md").read_text())


def test_findings_state_numbers():
    assert len(stated()) > 20


@pytest.mark.parametrize(("stem", "name", "text"), stated())
def test_each_number_in_the_findings_is_the_sidecars(stem, name, text):
    value = json.loads((ROOT / "figures" / f"{stem}.json").read_text())["values"][name]["value"]
    number = text.replace(",", "")
    decimals = len(number.partition(".")[2])
    # Rounded to the digits that are written; large numbers may be rounded to three digits.
    tolerance = max(0.5000001 * 10**-decimals, 5e-4 * abs(value))
    assert abs(float(number) - value) <= tolerance


def test_words_and_stems_that_the_readme_shows_exist():
    text = (ROOT / "README.md").read_text()
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands} | {"models", "eval"}
    words = set(re.findall(r"(?:`|\$ )wqlab ([a-z]+)", text))
    assert {"reproduce", "figure", "claims", "list", "doctor", "models", "bench"} <= words <= known
    assert set(re.findall(r"wqlab figure ([a-z]\w+)", text)) <= set(experiments.stems())
    assert set(re.findall(r"\| `(\w+)` \|", text)) == set(experiments.stems())


def test_the_counts_that_the_readme_shows_are_the_ledgers():
    shown = re.search(r"^(\d+) claims: ([^.]*?)\n\.\.\.", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    rows = claims.judge_all()
    counted = Counter(row["verdict"] for row in rows)
    assert int(shown[1]) == len(rows)
    assert {verdict: int(count) for count, verdict in re.findall(r"(\d+) (\w+)", shown[2])} == dict(counted)


def test_verdicts_are_explained():
    text = (ROOT / "docs" / "artifact.md").read_text()
    assert all(f"`{verdict}`" in text for verdict in claims.VERDICTS)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_files_that_the_pages_link_to_exist(page):
    path = ROOT / page
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}"
