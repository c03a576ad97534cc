"""A result for people to read."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def render(result: dict[str, Any]) -> tuple[Table, str]:
    """Return a table of what `evaluate` returned, over all questions and per task, and the lines to print under it."""
    table = Table(
        "", "n", "accuracy", "fp16", "difference", "KL (nats)", "flips", "margin (nats)", "difference", box=None, pad_edge=False
    )
    for name, row in {"all": result, **result["tasks"]}.items():
        table.add_row(
            name,
            str(row["n"]),
            _percent(row, "accuracy"),
            f"{row['accuracy_fp16']:.1%}",
            _percent(row, "accuracy_difference", "+"),
            _number(row, "kl", ".2g"),
            _percent(row, "flip_rate"),
            _number(row, "margin", ".2f"),
            _number(row, "margin_difference", "+.2g"),
        )
    eyes = ", visual tokens zeroed" if result["blind"] else ""
    lines = [
        f"{result['setting']}, {result['protocol']}, {result['split']} split, seed {result['seed']}, {result['num_frames']} frames"
        + eyes,
        f"video: {result['bits_per_element']:.2f} bits per element with metadata, {result['bytes_held']:,} bytes "
        f"(FP16: {result['bytes_fp16']:,})",
        f"in brackets: 95 % intervals, paired over the questions; one answer of {result['n']} is {result['one_answer']:.2%}",
        f"{result['runtime_s']:.0f} s on {result['hardware']}; {result['kept']} answers kept from before; {result['folder']}",
    ]
    return table, "\n".join([*lines, *result["notes"]])


def _percent(row: dict[str, Any], name: str, sign: str = "") -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:{sign}.1%} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def _number(row: dict[str, Any], name: str, form: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:{form}} [{low:{form}}, {high:{form}}]"
