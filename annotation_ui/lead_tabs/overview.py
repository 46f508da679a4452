"""The Overview tab: first steps, progress, speed and agreement.

Judgments per day are bars in a table, a part for each labeler: it fits a phone and is read aloud as it is.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from sqlalchemy import select
from sqlalchemy.orm import Session

from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.tables import show, table
from annotation_ui.reports import overview
from annotation_ui.server.services import Services
from annotation_ui.store.schema import Batch, Export, Guideline, Judgment, User

# (title, what it is good for, the tab that does it, what is there once it is done)
_STEPS = (
    ("Add the people who label", "Each gets a password, which is shown once.", "Users",
     select(User.id).where(User.role == "labeler")),
    ("Write guidelines", "Labelers are asked to read them before they start, and told of every new version.",
     "Rules and guidelines", select(Guideline.id)),
    ("Import a batch", "Prompts or samples as JSON Lines, for example from <code>align sample</code>.", "Import",
     select(Batch.id)),
    ("Let people label", "They sign in at this address and see the batch at once.", "Items", select(Judgment.id)),
    ("Export", "The files are what <code>align reward</code> and <code>align sft</code> read.", "Export",
     select(Export.id)),
)  # fmt: skip


def first_steps_html(session: Session) -> str:
    """The list of steps with those that are done ticked, or nothing if all are."""
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


# A step opens its tab.
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
    """The rows of `overview.per_day` as HTML, the latest day on top."""
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


_NO_BATCH = "No batch yet. Import prompts or samples on the Import tab."
_NO_AGREEMENT = "Agreement needs an item of this task that two labelers have judged."
_NO_WINS = "Win rates appear when somebody has judged an item of Compare two."
_NO_DAY = "Nobody has judged an item of this task in the last 30 days."


def overview_tab(page: gr.Blocks, services: Services) -> None:
    """Build the tab's tables, which are read again every 30 seconds."""
    steps = gr.HTML(js_on_load=OPEN_TAB, apply_default_css=False)
    progress = table("Progress")
    with gr.Row():
        task = task_list()
        refresh = gr.Button("Refresh", scale=0)
    with gr.Row(equal_height=False):
        agreement = table("Agreement")
        wins = table("Win rates (Compare two)")
    days = table("Judgments per day")

    def read_overview(task: str) -> list[Any]:
        with services.database.read() as session:
            coefficients = [row for row in overview.coefficients(session, task) if row["shared items"]]
            return [
                first_steps_html(session),
                show(overview.progress(session), _NO_BATCH),
                show(coefficients, _NO_AGREEMENT),
                show(overview.win_rates(session), _NO_WINS),
                day_chart(overview.per_day(session, task), _NO_DAY),
            ]

    shown = [steps, progress, agreement, wins, days]
    gr.on([page.load, refresh.click, task.change, gr.Timer(30).tick], read_overview, task, shown, **LAST_COUNTS)
