"""Numbers and names in the documents are those of the project."""

import json
import re
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


def test_words_of_the_command_that_the_readme_shows_exist():
    text = (ROOT / "README.md").read_text()
    words = set(re.findall(r"wqlab (reproduce|figure|list|doctor|lab|models|bench|claims|\w+)(?: |`|$)", text))
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands} | {"models"}
    known = {word.rstrip("_") for word in known}
    assert {"reproduce", "figure", "claims"} <= words & known
    stems = set(re.findall(r"wqlab (?:figure|reproduce) ([a-z]\w+)", text))
    assert stems <= set(experiments.stems())


def test_verdicts_are_explained():
    text = (ROOT / "docs" / "artifact.md").read_text()
    assert all(f"`{verdict}`" in text for verdict in claims.VERDICTS)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/artifact.md", "docs/findings.md"])
def test_files_that_the_pages_link_to_exist(page):
    path = ROOT / page
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}"
