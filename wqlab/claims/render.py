"""The ledger as JSON, as a table for the terminal, and as one HTML page without outside files."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any

from wqlab.claims.schema import VERDICTS
from wqlab.records import dump_json

if TYPE_CHECKING:
    from rich.table import Table

#: verdict -> (sign, colour in a terminal, colour on a page). The sign and the word carry the meaning, the colour helps.
_LOOKS = {
    "reproduced": ("✓", "green", "#00664b"),
    "direction_holds": ("↗", "cyan", "#0063a0"),
    "direction_holds_on_proxy": ("↗", "cyan", "#1f6f99"),
    "contradicted": ("✗", "red", "#a83c00"),
    "direction_fails_on_proxy": ("↘", "red", "#a83c00"),
    "inconsistent_in_paper": ("≠", "magenta", "#8a3d6b"),
    "not_testable_here": ("·", "bright_black", "#5f5f5f"),
}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>wqlab: the ledger of claims</title>
<style>
:root {{ color-scheme: light; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .25rem; }} h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
.lead {{ color: #555; margin: 0 0 1rem; max-width: 72ch; }}
.count {{ display: inline-block; margin: 0 .5rem .5rem 0; padding: .2rem .65rem; border: 1px solid #ddd; border-radius: 999px; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th {{ text-align: left; border-bottom: 2px solid #1c1c1c; padding: .4rem .6rem; position: sticky; top: 0; background: #fff; }}
td {{ border-bottom: 1px solid #e6e6e6; padding: .5rem .6rem; vertical-align: top; }}
td.n {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
.v {{ font-weight: 600; white-space: nowrap; }} small {{ color: #5f5f5f; display: block; }} code {{ font-size: .85em; }}
</style></head><body>
<h1>The ledger of claims</h1>
<p class="lead">{total} claims. Every verdict is computed from the files of this checkout: the sidecars in figures/ and the printed
numbers in data/paper.</p>
<p>{counts}</p>
{sections}
</body></html>
"""
_HEAD = "<tr><th>Where</th><th>Claim</th><th>Paper</th><th>Ours</th><th>Verdict</th><th>Evidence and how to repeat it</th></tr>"


def to_json(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a JSON list."""
    return dump_json(rows)


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table that rich prints."""
    from rich.table import Table
    from rich.text import Text

    counts = Counter(row["verdict"] for row in rows)
    summary = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
    shown = Table(title=f"{len(rows)} claims: {summary}", title_justify="left", show_lines=False)
    for name in ("where", "claim", "paper", "ours", "verdict", "why"):
        shown.add_column(name, justify="right" if name in ("paper", "ours") else "left", overflow="fold")
    for row in rows:
        sign, colour, _ = _LOOKS[row["verdict"]]
        verdict = Text(f"{sign} {row['verdict']}", style=colour)
        values = (_number(row["paper_value"], row["unit"]), _number(row["our_value"], row["unit"]))
        shown.add_row(Text(row["where"]), Text(row["id"]), *values, verdict, Text(row["reason"]))
    return shown


def to_html(rows: list[dict[str, Any]]) -> str:
    """Return the rows as one self-contained page, a section per paper."""
    counts = Counter(row["verdict"] for row in rows)
    chips = "".join(f'<span class="count">{_badge(v)} {counts[v]}</span>' for v in VERDICTS if counts[v])
    sections = []
    for paper in dict.fromkeys(row["paper"] for row in rows):
        body = "\n".join(_html_row(row) for row in rows if row["paper"] == paper)
        sections.append(f"<h2>{escape(paper)}</h2>\n<table><thead>{_HEAD}</thead>\n<tbody>\n{body}\n</tbody></table>")
    return _PAGE.format(total=len(rows), counts=chips, sections="\n".join(sections))


def _html_row(row: dict[str, Any]) -> str:
    paper, ours = (escape(_number(row[key], row["unit"])) for key in ("paper_value", "our_value"))
    run = f"<code>{escape(row['command'])}</code>" if row["command"] else ""
    minutes = f"{row['minutes']:g} min on " if row["minutes"] is not None else ""
    cells = [
        f"<td>{escape(row['where'])}</td>",
        f"<td>{escape(row['statement'])}<small>{escape(row['id'])}</small></td>",
        f'<td class="n">{paper}</td><td class="n">{ours}</td>',
        f"<td>{_badge(row['verdict'])}<small>{escape(row['reason'])}</small></td>",
        f"<td>{escape(row['evidence'])}<small>{run} {escape(minutes + row['hardware'])}</small></td>",
    ]
    return f'<tr id="{escape(row["id"])}">{"".join(cells)}</tr>'


def _badge(verdict: str) -> str:
    sign, _, colour = _LOOKS[verdict]
    return f'<span class="v" style="color:{colour}">{sign} {escape(verdict.replace("_", " "))}</span>'


def _number(value: float | None, unit: str | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if unit in (None, "1", "yes = 1") else f"{value:.4g} {unit}"
