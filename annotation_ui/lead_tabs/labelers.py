"""The Labelers tab, with the items behind each reliability, and the Disagreements tab, for the lead to decide."""

from typing import Any

import gradio as gr

from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.reports import overview
from annotation_ui.reports.labeler_report import items_behind_reliability, labeler_rows
from annotation_ui.server.services import Services
from annotation_ui.tasks import TASKS

_ABOUT = (
    "*Agreement with others* is a plain share. *Reliability* is how often a labeler is right, as the model of Dawid and "
    "Skene estimates it from everybody's answers: to agree with careful labelers counts more. *Training* and *attention* "
    "are the agreement with known answers. The interval becomes narrower with each item that somebody else judged, too. Two "
    "labelers who share all of their items cannot be told apart."
)
_NO_LABELER = "Nobody has judged an item of this task yet."
_CHOOSE_ONE = "Choose a labeler above to see the items that decide the estimate."
_NOT_SHARED = "This labeler shares no item of this task with another one: there is nothing to estimate from."


def labelers_tab(tab: gr.Tab, services: Services) -> None:
    """Build the table of labelers and that of the items behind a labeler's reliability."""
    gr.Markdown(_ABOUT)
    with gr.Row():
        task = task_list()
        refresh = gr.Button("Refresh", scale=0)
    labelers = table("Labelers", "labelers")
    items = table("Items that decide it")

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


_NONE = "Labelers disagree on nothing that is not decided yet. Items need two labelers for this (a setting of the batch)."
_OPEN = """(task) => {
  const item = document.querySelector('#disagreements .picked')?.dataset.key ?? '';
  window.location.assign(`../?task=${task}&decide=${item}`);
}"""


def disagreements_tab(tab: gr.Tab, services: Services) -> None:
    """Build the tab's table; a click on a row, or the button, opens an item for the lead's decision."""
    gr.Markdown("Click an item to decide it. After each decision comes the next disagreement, until you stop.")
    with gr.Row():
        task = task_list(comparable=True)
        refresh = gr.Button("Refresh", scale=0)
        decide = gr.Button("Decide the worst", variant="primary", scale=0)
    rows = table("Items on which labelers differ, worst first", "disagreements")

    def list_disagreements(task: str) -> tuple[str, Any]:
        with services.database.read() as session:
            found = overview.disagreements(session, task)
        return show(found, _NONE, key="item"), gr.update(interactive=bool(found))

    gr.on([tab.select, refresh.click, task.change], list_disagreements, task, [rows, decide], **LAST_COUNTS)
    rows.select(None, task, None, js=_OPEN)
    decide.click(None, task, None, js=_OPEN)
