"""Overview tab: first steps, progress, agreement, win rates, ratings, and judgments per day.

Charts are HTML tables with bars, so they fit on a phone and work with screen readers.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from sqlalchemy import select
from sqlalchemy.orm import Session

from align.data.records import RATINGS
from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.tables import show, table
from annotation_ui.reports import overview
from annotation_ui.reports.ratings import ratings_by_model
from annotation_ui.reports.row_files import plain_cell
from annotation_ui.server.services import Services
from annotation_ui.store.schema import Batch, Export, Guideline, Judgment, User

# (title, purpose, tab, query that returns a row once the step is finished)
_STEPS = (
    ("Add labelers", "Each labeler gets a password, which is shown once.", "Users",
     select(User.id).where(User.role == "labeler")),
    ("Write guidelines", "Labelers read them before they start, and are notified of new versions.",
     "Rules and guidelines", select(Guideline.id)),
    ("Import a batch", "Prompts or samples as JSON Lines, for example from <code>align sample</code>.", "Import",
     select(Batch.id)),
    ("Start labeling", "Labelers sign in at this address and see the batch immediately.", "Items", select(Judgment.id)),
    ("Export", "<code>align reward</code> and <code>align sft</code> read the exported files.", "Export",
     select(Export.id)),
)  # fmt: skip


def first_steps_html(session: Session) -> str:
    """Return the first steps as HTML, with finished steps marked. Return empty text if all are finished."""
    done = [session.scalar(query.limit(1)) is not None for *_, query in _STEPS]
    if all(done):
        return ""
    current = done.index(False)
    rows = "".join(
        f'<li class="{"done" if done[i] else "current" if i == current else ""}">'
        f'<button type="button" data-tab="{escape(tab)}">{escape(title)}</button>'
        f'<span class="visually-hidden">{"done" if done[i] else "to do"}</span><p>{why}</p></li>'
        for i, (title, why, tab, _) in enumerate(_STEPS)
    )
    return f'<section class="first-steps"><h2>First steps</h2><ol>{rows}</ol></section>'


# Clicking a step opens its tab.
OPEN_TAB = """
element.addEventListener('click', (event) => {
  const step = event.target.closest('[data-tab]');
  if (!step) return;
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  tabs.find((tab) => tab.textContent.trim() === step.dataset.tab)?.click();
});
"""


COLORS = 7  # .color-0 to .color-6 in lead.css


def day_chart(rows: Sequence[dict[str, Any]], empty: str) -> str:
    """Render the rows of `overview.per_day` as HTML, latest day first."""
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
    head = '<th scope="col">day (UTC)</th><th scope="col">judgments</th><th scope="col">by labeler</th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<ul class="legend" aria-hidden="true">{legend}</ul><div class="scroll days">{table}</div>'


def _sort_key(labeler: str) -> tuple[bool, str]:
    """Return a key that sorts labelers by name. "3 others" sorts last, because no user name contains a space."""
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


def ratings_chart(rows: Sequence[dict[str, Any]], empty: str) -> str:
    """Render the rows of `ratings_by_model` as HTML, with the mean, its interval, and the distribution as a bar."""
    if not rows:
        return f'<p class="empty">{escape(empty)}</p>'
    low, high = RATINGS
    legend = "".join(f'<li><span class="rating-{rating}"></span>{rating}</li>' for rating in range(low, high + 1))
    head = "".join(f'<th scope="col">{name}</th>' for name in ("model", "ratings", "mean (95 %)", "distribution"))
    body = "".join(map(_ratings_row, rows))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<ul class="legend" aria-hidden="true">{legend}</ul><div class="scroll days ratings-chart">{table}</div>'


def _ratings_row(row: dict[str, Any]) -> str:
    def place(value: float) -> float:
        return 100 * (min(max(value, RATINGS[0]), RATINGS[1]) - RATINGS[0]) / (RATINGS[1] - RATINGS[0])

    counts = list(enumerate(row["counts"], start=RATINGS[0]))
    parts = "".join(
        f'<span class="rating-{rating}" style="flex: {count}" title="{rating}: {count:,}"></span>'
        for rating, count in counts
        if count
    )
    mean, low, high = row["mean"], row["low"], row["high"]
    interval, line = "", ""
    if low is not None:
        interval = f" ({low:.2f} to {high:.2f})"
        line = f'<span class="interval" style="left: {place(low):.1f}%; width: {place(high) - place(low):.1f}%"></span>'
    marks = f'<div class="scale">{line}<span class="mean" style="left: {place(mean):.1f}%"></span></div>'
    scale = f'<div class="axis" aria-hidden="true">{RATINGS[0]}{marks}{RATINGS[1]}</div>'
    spoken = f'<span class="visually-hidden">{", ".join(f"{rating}: {count:,}" for rating, count in counts)}</span>'
    cells = f'<td class="number">{row["ratings"]:,}</td><td class="number">{mean:.2f}{interval}{scale}</td>'
    bar = f'<div class="stack" aria-hidden="true">{parts}</div>'
    return f"<tr><td>{escape(plain_cell(row['model']))}</td>{cells}<td>{bar}{spoken}</td></tr>"


_NO_BATCH = "No batches yet. Import prompts or samples in the Import tab."
_NO_AGREEMENT = "No item of this task has answers from two labelers yet."
_NO_WINS = "No judgments in Compare two yet."
_NO_RATINGS = "No rated responses in Rank responses yet."
_NO_DAY = "No judgments of this task in the last 30 days."


def _without_complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the column `complete` if all batches are completely imported."""
    if all(row["complete"] for row in rows):
        return [{name: value for name, value in row.items() if name != "complete"} for row in rows]
    return rows


def overview_tab(page: gr.Blocks, services: Services) -> None:
    """Build the tab. Its tables refresh every 30 seconds."""
    steps = gr.HTML(js_on_load=OPEN_TAB, apply_default_css=False)
    progress = table("Progress")
    with gr.Row():
        task = task_list()
        refresh = gr.Button("Refresh", scale=0)
    with gr.Row(equal_height=False):
        agreement = table("Agreement")
        wins = table("Win rates (Compare two)")
    ratings = table("Ratings from 1 to 7 (Rank responses)")
    days = table("Judgments per day")

    def read_overview(task: str) -> list[Any]:
        with services.database.read() as session:
            coefficients = [row for row in overview.coefficients(session, task) if row["shared items"]]
            return [
                first_steps_html(session),
                show(_without_complete(overview.progress(session)), _NO_BATCH),
                show(coefficients, _NO_AGREEMENT),
                show(overview.win_rates(session), _NO_WINS),
                ratings_chart(ratings_by_model(session), _NO_RATINGS),
                day_chart(overview.per_day(session, task), _NO_DAY),
            ]

    shown = [steps, progress, agreement, wins, ratings, days]
    gr.on([page.load, refresh.click, task.change, gr.Timer(30).tick], read_overview, task, shown, **LAST_COUNTS)
