"""What the labelers do: progress, agreement, and the items to decide."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pandas as pd

from annotation_ui import overview
from annotation_ui.lead_tabs.common import AGREED, TASK_CHOICES, table_of, user_id
from annotation_ui.services import Services


def overview_tab(page: gr.Blocks, services: Services) -> None:
    with gr.Row():
        task = gr.Dropdown(TASK_CHOICES, value="rank", label="Task")
        refresh = gr.Button("Refresh", scale=0)
    progress = gr.Dataframe(label="Progress", interactive=False)
    with gr.Row():
        done = gr.BarPlot(x="batch", y="percent", title="Done (%)", y_lim=[0, 100], height=260)
        speed = gr.BarPlot(x="day", y="judgments", color="labeler", title="Judgments a day", height=260)
    labelers = gr.Dataframe(label="Labelers", interactive=False)
    with gr.Row():
        agreement = gr.Dataframe(label="Agreement", interactive=False)
        wins = gr.Dataframe(label="Win rates of Compare", interactive=False)

    def show(task: str) -> list[pd.DataFrame]:
        with services.database.read() as session:
            rows = overview.progress(session)
            return [
                table_of(rows),
                pd.DataFrame([row for row in rows if row["task"] == task], columns=["batch", "percent"]),
                pd.DataFrame(overview.per_day(session, task), columns=["day", "labeler", "judgments"]),
                table_of(overview.labelers(session, task)),
                table_of(overview.coefficients(session, task)),
                table_of(overview.win_rates(session)),
            ]

    shown = [progress, done, speed, labelers, agreement, wins]
    gr.on([page.load, refresh.click, task.input, gr.Timer(30).tick], show, task, shown, show_progress="hidden")


def disagreements_tab(page: gr.Blocks, services: Services) -> None:
    with gr.Row():
        task = gr.Dropdown(AGREED, value="rank", label="Task")
        refresh = gr.Button("Refresh", scale=0)
    table = gr.Dataframe(label="Items on which labelers differ, worst first", interactive=False, wrap=True)
    with gr.Row():
        item = gr.Dropdown([], label="Item to decide")
        decide = gr.Button("Decide it", variant="primary", scale=0)

    def show(task: str) -> tuple[pd.DataFrame, Any]:
        with services.database.read() as session:
            rows = overview.disagreements(session, task)
        choices = [(f"{row['item']} ({row['agreement']:.2f}) {row['prompt'][:60]}", row["item"]) for row in rows]
        return table_of(rows), gr.update(choices=choices, value=choices[0][1] if choices else None)

    def open_item(item: int | None, request: gr.Request) -> None:
        if item is None:
            raise gr.Error("Choose an item first")
        services.leases.adjudicate(user_id(services, request), int(item))

    gr.on([page.load, refresh.click, task.input], show, task, [table, item], show_progress="hidden")
    decide.click(open_item, item).success(None, task, js="(task) => window.location.assign('/?task=' + task)")
