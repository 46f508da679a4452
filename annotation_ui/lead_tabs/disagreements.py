"""The Disagreements tab: the items on which labelers differ, for the lead to decide."""

from __future__ import annotations

from typing import Any

import gradio as gr

from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.tables import show, table
from annotation_ui.reports import overview
from annotation_ui.server.services import Services

_NONE = "Labelers disagree on nothing that is not decided yet. Items need two labelers for this (a setting of the batch)."
_OPEN = """(task) => {
  const item = document.querySelector('#disagreements .picked')?.dataset.key ?? '';
  window.location.assign(`/?task=${task}&decide=${item}`);
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
