"""Who may come in, and what goes out: users and exports."""

from __future__ import annotations

import secrets
import time
from typing import Any

import gradio as gr
import pandas as pd
from sqlalchemy import select

from annotation_ui.export import FORMATS, RECORDS, Selection, export
from annotation_ui.lead_tabs.common import table_of, told, user_id
from annotation_ui.schema import ROLES, Batch, User
from annotation_ui.services import Services


def users_tab(page: gr.Blocks, services: Services) -> None:
    table = gr.Dataframe(label="Users", interactive=False)
    with gr.Row():
        name, role = gr.Textbox(label="Name", max_length=64), gr.Dropdown(list(ROLES), value="labeler", label="Role")
    with gr.Row():
        add, reset = gr.Button("Add", variant="primary"), gr.Button("New password")
        shut, admit = gr.Button("Shut out"), gr.Button("Let in")
    said = gr.Textbox(label="Result", interactive=False)

    def users() -> pd.DataFrame:
        with services.database.read() as session:
            found = session.scalars(select(User).order_by(User.name)).all()
        return table_of([{"name": u.name, "role": u.role, "active": u.active, "exported as": u.pseudonym} for u in found])

    def create(name: str, role: str) -> str:
        return f"Password of {name} (shown only now): {services.auth.create_user(name, role)}"

    def new_password(name: str) -> str:
        return f"Password of {name} (shown only now): {services.auth.set_password(name)}"

    def shut_out(name: str) -> str:
        services.auth.set_active(name, False)
        return f"{name} is shut out and signed out."

    def let_in(name: str) -> str:
        services.auth.set_active(name, True)
        return f"{name} may sign in."

    page.load(users, None, table, show_progress="hidden")
    for button, action, inputs in ((add, create, [name, role]), (reset, new_password, [name]),
                                   (shut, shut_out, [name]), (admit, let_in, [name])):  # fmt: skip
        button.click(told(action), inputs, said).success(users, None, table)


def export_tab(services: Services) -> None:
    with gr.Row():
        record = gr.Dropdown(list(RECORDS), value="rankings", label="What")
        kind = gr.Dropdown(list(FORMATS), value="jsonl", label="Format (csv: for a spreadsheet)")
        batches = gr.Dropdown([], label="Batches (none: all)", multiselect=True)
    with gr.Row():
        aggregated = gr.Checkbox(label="One row an item (aggregated)")
        gold = gr.Checkbox(label="Gold items too")
        tied = gr.Checkbox(label="Rankings that tie everything too (training refuses them)")
        since = gr.DateTime(label="Only since", type="timestamp", timezone="UTC")
    button = gr.Button("Export", variant="primary")
    files = gr.File(label="Files", file_count="multiple", interactive=False)
    manifest = gr.JSON(label="Manifest")

    def names() -> Any:
        with services.database.read() as session:
            return gr.update(choices=session.scalars(select(Batch.name).order_by(Batch.id)).all())

    def write(
        record: str,
        kind: str,
        batches: list[str],
        aggregated: bool,
        gold: bool,
        tied: bool,
        since: float | None,
        request: gr.Request,
    ) -> tuple[list[str], dict[str, Any]]:
        selection = Selection(record, aggregated, float(since) if since else None, tuple(batches or ()), gold, tied)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = services.settings.exports / f"{record}-{stamp}-{secrets.token_hex(4)}.{kind}"
        made = export(services.database, selection, path, user_id(services, request))
        return [str(path), f"{path}.manifest.json"], made

    batches.focus(names, None, batches, show_progress="hidden")
    button.click(told(write), [record, kind, batches, aggregated, gold, tied, since], [files, manifest])
