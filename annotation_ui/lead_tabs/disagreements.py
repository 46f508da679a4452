"""The Disagreements tab: the items on which labelers differ, for the lead to decide."""

from __future__ import annotations

from typing import Any

import gradio as gr

from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.reports import overview
from annotation_ui.server.services import Services

_NONE = "Labelers disagree on nothing that is not decided yet. Items need two labelers for this (a setting of the batch)."
_OPEN = "(task, item) => window.location.assign(`/?task=${task}&decide=${item ?? ''}`)"


def disagreements_tab(tab: gr.Tab, services: Services) -> None:
    """Build the tab's table; a chosen row, or the button, opens an item for the lead's decision."""
    gr.Markdown("Choose an item to decide it. After each decision comes the next disagreement, until you stop.")
    with gr.Row():
        task = task_list(comparable=True)
        refresh = gr.Button("Refresh", scale=0)
        decide = gr.Button("Decide it", variant="primary", scale=0)
    rows = table("Items on which labelers differ, worst first", "disagreements")
    item = gr.Number(None, visible=False, precision=0)

    def list_disagreements(task: str) -> tuple[str, Any, Any]:
        with services.database.read() as session:
            found = overview.disagreements(session, task)
        return show(found, _NONE, key="item"), None, gr.update(interactive=bool(found), value="Decide the worst")

    def choose(number: str) -> tuple[int, Any]:
        return int(number), gr.update(value=f"Decide item {number}")

    gr.on([tab.select, refresh.click, task.change], list_disagreements, task, [rows, item, decide], **LAST_COUNTS)
    when_picked(rows, choose, [], [item, decide])
    decide.click(None, [task, item], None, js=_OPEN)
