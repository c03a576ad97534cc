"""The ledger: what the papers claim, judged from files. A verdict is computed, never typed in.

``data/claims/<paper>.yml`` holds the claims (`Claim`; the header of the file explains every field). A claim is judged by a named
value of a sidecar ``figures/<stem>.json``, or, where the paper disagrees with itself, by the printed numbers in ``data/paper``.

Like is compared only with like:

* units are equal, character by character;
* the evidence of our value is of a kind that the claim accepts: ``measured`` and ``recorded`` unless the entry says otherwise,
  ``simulated`` only where the claim itself is arithmetic, and never ``paper``;
* the sidecar is complete, was not made with ``--quick``, and was made with the experiment's default parameters.

Where one of these fails the verdict is ``not_testable_here``, and the reason says what to run. Otherwise:

===================  ==================================================================================================
scope                verdict
===================  ==================================================================================================
same_setup           number within tolerance: ``reproduced``; else every direction of `expect` holds: ``direction_holds``
                     (``reproduced`` where the claim is a direction and has no number); else ``contradicted``
same_mechanism       the same, except that a direction alone never gives more than ``direction_holds``
proxy                directions only: ``direction_holds_on_proxy`` or ``direction_fails_on_proxy``
``inner: true``      the paper against itself: ``inconsistent_in_paper``, or ``not_testable_here`` where it agrees with itself
===================  ==================================================================================================
"""

from wqlab.claims.history import Order, committed_before, tolerance_commit
from wqlab.claims.judge import Judged, figures_dir, judge, judge_all
from wqlab.claims.render import table, to_html, to_json
from wqlab.claims.schema import VERDICTS, Claim, claims_of, ledger, papers

__all__ = [
    "VERDICTS",
    "Claim",
    "Judged",
    "Order",
    "claims_of",
    "committed_before",
    "figures_dir",
    "judge",
    "judge_all",
    "ledger",
    "papers",
    "table",
    "to_html",
    "to_json",
    "tolerance_commit",
]
