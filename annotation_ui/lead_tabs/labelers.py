"""Labelers tab, with the items behind each reliability estimate, and Disagreements tab."""

from typing import Any

import gradio as gr

from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.reports import overview
from annotation_ui.reports.labeler_report import items_behind_reliability, labeler_rows
from annotation_ui.server.services import Services
from annotation_ui.tasks import TASKS

_ABOUT = (
    "*Agreement with others* is the mean agreement with the other labelers of each item. *Reliability* is the probability "
    "that a labeler's answer is correct, estimated with Dawid and Skene's model: agreement with reliable labelers counts "
    "more. *Training* and *attention* are the agreement with known answers. The interval narrows with each shared item. Two "
    "labelers who share all of their items cannot be told apart."
)
_NO_LABELER = "No judgments of this task yet."
_CHOOSE_ONE = "Select a labeler to see the items behind the estimate."
_NOT_SHARED = "This labeler shares no items of this task with other labelers."


def labelers_tab(tab: gr.Tab, services: Services) -> None:
    """Build the table of labelers, and the table of items behind the selected labeler's reliability."""
    gr.Markdown(_ABOUT)
    with gr.Row():
        task = task_list()
        refresh = gr.Button("Refresh", scale=0)
    labelers = table("Labelers", "labelers")
    items = table("Items behind the estimate")

    def list_labelers(task: str) -> tuple[str, str]:
        with services.database.read() as session:
            rows = labeler_rows(session, task)
        return show(rows, _NO_LABELER, key="labeler"), show([], _CHOOSE_ONE)

    def list_items(task: str, labeler: str) -> str:
        if not TASKS[task].comparable:
            return show([], "Answers to this task cannot be compared.")
        with services.database.read() as session:
            rows: list[dict[str, Any]] = items_behind_reliability(session, task, labeler)
        return show(rows, _NOT_SHARED)

    gr.on([tab.select, refresh.click, task.change], list_labelers, task, [labelers, items], **LAST_COUNTS)
    when_picked(labelers, list_items, [task], items)


_NONE = "No undecided disagreements. To measure agreement, assign two or more labelers per item in the Batches tab."
_OPEN = """(task) => {
  const item = document.querySelector('#disagreements .picked')?.dataset.key ?? '';
  window.location.assign(`../?task=${task}&decide=${item}`);
}"""


def disagreements_tab(tab: gr.Tab, services: Services) -> None:
    """Build the tab. Clicking a row or the button opens an item for the lead's decision."""
    gr.Markdown("Click an item to decide it. After each decision, the next disagreement opens.")
    with gr.Row():
        task = task_list(comparable=True)
        refresh = gr.Button("Refresh", scale=0)
        decide = gr.Button("Start deciding", variant="primary", scale=0)
    rows = table("Items by agreement, lowest first", "disagreements")

    def list_disagreements(task: str) -> tuple[str, Any]:
        with services.database.read() as session:
            found = overview.disagreements(session, task)
        return show(found, _NONE, key="item"), gr.update(interactive=bool(found))

    gr.on([tab.select, refresh.click, task.change], list_disagreements, task, [rows, decide], **LAST_COUNTS)
    rows.select(None, task, None, js=_OPEN)
    decide.click(None, task, None, js=_OPEN)
