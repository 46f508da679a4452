"""The Overview tab: first steps, progress, speed and agreement."""

from __future__ import annotations

from typing import Any

import gradio as gr

from annotation_ui.lead_tabs.common import LAST_COUNTS, task_list
from annotation_ui.lead_tabs.day_chart import day_chart
from annotation_ui.lead_tabs.first_steps import OPEN_TAB, first_steps_html
from annotation_ui.lead_tabs.tables import show, table
from annotation_ui.reports import overview
from annotation_ui.server.services import Services

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
