"""The model that probing labelers talk to: load it, see how that goes, unload it."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr
from sqlalchemy import select

from align.models.zoo import list_builtin
from annotation_ui.lead_tabs.common import told
from annotation_ui.schema import Batch
from annotation_ui.services import Services

_WORDS = {"none": "No model is loaded", "loading": "Loading", "loaded": "Loaded", "failed": "Not loaded"}


def models_tab(page: gr.Blocks, services: Services) -> None:
    checkpoints = services.checkpoints
    gr.Markdown(
        "The model that labelers talk to in *Probe a model*: a folder, the model of a run, an adapter, a hub name or a "
        "built-in one. One is in memory at a time, in a process of its own. A batch that names a model loads it with its "
        "first message; a batch that names none talks to the one loaded here."
    )
    with gr.Row():
        name = gr.Dropdown(list(list_builtin()), value=None, label="Model", allow_custom_value=True, scale=3)
        load = gr.Button("Load", variant="primary", scale=0)
        unload = gr.Button("Unload", scale=0)
    status = gr.HTML(elem_id="model-status")

    def show() -> str:
        now = checkpoints.status
        words = [_WORDS[now.state], now.name, now.detail]
        state, which, detail = (html.escape(text) for text in words)
        return f'<p class="status {now.state}" role="status"><b>{state}</b> <code>{which}</code> <span>{detail}</span></p>'

    def names() -> Any:
        with services.database.read() as session:
            batches = session.scalars(select(Batch).where(Batch.task == "probe", Batch.open)).all()
        named = {str(batch.settings["checkpoint"]) for batch in batches if "checkpoint" in batch.settings}
        return gr.update(choices=[*sorted(named), *list_builtin()])

    def load_it(name: str | None) -> str:
        checkpoints.load(name or "")
        return show()

    def unload_it() -> str:
        checkpoints.unload()
        return show()

    gr.on([page.load, gr.Timer(1).tick], show, None, status, show_progress="hidden")
    name.focus(names, None, name, show_progress="hidden")
    load.click(told(load_it), name, status)
    unload.click(unload_it, None, status)
