"""Was a tolerance committed before the measurement that it judges? Git knows."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from wqlab.claims.schema import Claim, parse
from wqlab.errors import DamagedFileError


class Order(NamedTuple):
    """The answer: True (before, or in the same commit), False (after), or None where git cannot tell; and why."""

    holds: bool | None
    reason: str


def committed_before(claim: Claim, measured_at: str, repo: Path, file: str | None = None) -> Order:
    """Tell whether the rule of `claim` was committed no later than the commit of a measurement.

    Parameters
    ----------
    claim : Claim
        Its `rule` (value, tolerance, scope, directions) is looked up.
    measured_at : str
        The ``git_commit`` of a sidecar; a trailing ``+changes`` is ignored.
    repo : Path
        The root of the git checkout.
    file : str, optional
        The ledger, relative to `repo`; default ``data/claims/<paper>.yml``.
    """
    commit = measured_at.removesuffix("+changes")
    if _git(repo, "rev-parse", "--git-dir") is None:
        return Order(None, "no git history here")
    if _git(repo, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return Order(None, f"commit {commit} of the measurement is not in this clone (shallow or rewritten)")
    first = tolerance_commit(claim, repo, file)
    if first is None:
        return Order(False, f"{claim.id}: its present rule was never committed")
    if _git(repo, "merge-base", "--is-ancestor", first, commit) is not None:
        return Order(True, f"{claim.id}: rule of {first[:9]}, measured at {commit[:9]}")
    if _git(repo, "rev-parse", "--is-shallow-repository") == "true":
        return Order(None, f"a shallow clone does not show when {claim.id} got its rule")
    return Order(False, f"{claim.id}: got its rule in {first[:9]}, after it was measured at {commit[:9]}")


def tolerance_commit(claim: Claim, repo: Path, file: str | None = None) -> str | None:
    """Return the commit since which the entry has had its present rule without a break, or None if it never was committed.

    A rule that was changed and changed back counts from its return.
    """
    file = file or f"data/claims/{claim.paper}.yml"
    first = None
    for commit in (_git(repo, "log", "--topo-order", "--format=%H", "--", file) or "").split():
        entries = _entries(repo, commit, file)
        if entries is None or claim.rule not in [entry.rule for entry in entries if entry.id == claim.id]:
            break
        first = commit
    return first


@cache
def _entries(repo: Path, commit: str, file: str) -> list[Claim] | None:
    """Return the ledger at a commit, which never changes and which every claim asks for; None for an older schema or no file."""
    text = _git(repo, "show", f"{commit}:{file}")
    try:
        return parse(text or "", file, Path(file).stem)
    except DamagedFileError:
        return None


def _git(repo: Path, *arguments: str) -> str | None:
    """Return git's output, or None when it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=repo, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
