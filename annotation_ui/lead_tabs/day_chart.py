"""Judgments per day as bars, a part for each labeler: a table, which fits a phone and is read aloud as it is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

COLORS = 7  # .color-0 to .color-6 in lead.css


def day_chart(rows: Sequence[dict[str, Any]], empty: str) -> str:
    """The chart as HTML, the latest day on top.

    Args:
        rows: {day, labeler, judgments}, as `overview.per_day` returns them; at most `COLORS` labelers.
        empty: shown if there are no rows.
    """
    if not rows:
        return f'<p class="empty">{escape(empty)}</p>'
    labelers = sorted({row["labeler"] for row in rows}, key=_sort_key)
    colors = {labeler: f"color-{number % COLORS}" for number, labeler in enumerate(labelers)}
    by_day: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["day"], _sort_key(row["labeler"])), reverse=True):
        by_day.setdefault(row["day"], []).insert(0, row)
    busiest = max(_total(parts) for parts in by_day.values())
    body = "".join(_row(day, parts, busiest, colors) for day, parts in by_day.items())
    legend = "".join(f'<li><span class="{colors[name]}"></span>{escape(name)}</li>' for name in labelers)
    head = '<th scope="col">day (UTC)</th><th scope="col">judgments</th><th scope="col">of whom</th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<ul class="legend" aria-hidden="true">{legend}</ul><div class="scroll days">{table}</div>'


def _sort_key(labeler: str) -> tuple[bool, str]:
    """The place of a labeler in a bar: by name, and "3 others", which has a space as no name has, at the end."""
    return " " in labeler, labeler


def _total(parts: Sequence[dict[str, Any]]) -> int:
    return sum(part["judgments"] for part in parts)


def _row(day: str, parts: Sequence[dict[str, Any]], busiest: int, colors: dict[str, str]) -> str:
    descriptions = [f"{part['labeler']}: {part['judgments']:,}" for part in parts]
    bars = "".join(
        f'<span class="{colors[part["labeler"]]}" style="flex: {part["judgments"]}" title="{escape(text)}"></span>'
        for part, text in zip(parts, descriptions, strict=True)
    )
    bar = f'<div class="stack" aria-hidden="true" style="width: {100 * _total(parts) / busiest:.1f}%">{bars}</div>'
    spoken = f'<span class="visually-hidden">{escape(", ".join(descriptions))}</span>'
    return f'<tr><td class="time">{day}</td><td class="number">{_total(parts):,}</td><td>{bar}{spoken}</td></tr>'
