"""Model tab: load and unload the model of the Probe task, and show its state."""

import html
from typing import Any

import gradio as gr
from sqlalchemy import select

from align.model_registry.registry import registered_models
from annotation_ui.lead_tabs.common import show_user_errors
from annotation_ui.server.services import Services
from annotation_ui.store.schema import Batch

LOADING_SECONDS, RESTING_SECONDS = 1, 5
"""Polling intervals while a model is loading, and otherwise. The second is longer because a page may stay open all day."""
_STATE_TEXT = {"none": "No model loaded", "loading": "Loading", "loaded": "Loaded", "failed": "Failed to load"}


def models_tab(page: gr.Blocks, services: Services) -> None:
    """Build the tab. The model's state refreshes every few seconds."""
    checkpoints = services.checkpoints
    gr.Markdown(
        "The model for *Probe a model*: a folder, a run's model, an adapter, a hub name or a built-in model. The two most "
        "recently used models stay in memory, each in its own process. A batch that names a model loads it with the first "
        "message. Other batches use the model loaded here."
    )
    with gr.Row():
        name = gr.Dropdown(list(registered_models()), value=None, label="Model", allow_custom_value=True, scale=3)
        load = gr.Button("Load", variant="primary", scale=0)
        unload = gr.Button("Unload", scale=0)
    status, timer = gr.HTML(elem_id="model-status"), gr.Timer(RESTING_SECONDS)

    def read_status() -> tuple[str, float]:
        current = checkpoints.status
        state, name, detail = (html.escape(text) for text in (_STATE_TEXT[current.state], current.name, current.detail))
        text = (
            f'<p class="status {current.state}" role="status"><b>{state}</b> <code>{name}</code> <span>{detail}</span></p>'
        )
        return text, LOADING_SECONDS if current.state == "loading" else RESTING_SECONDS

    def list_models() -> Any:
        with services.database.read() as session:
            batches = session.scalars(select(Batch).where(Batch.open)).all()
        named = {str(batch.settings["checkpoint"]) for batch in batches if "checkpoint" in batch.settings}
        return gr.update(choices=[*sorted(named), *registered_models()])

    def load_model(name: str | None) -> tuple[str, float]:
        checkpoints.load(name or "")
        return read_status()

    def unload_model() -> tuple[str, float]:
        checkpoints.unload()
        return read_status()

    shown = [status, timer]
    gr.on([page.load, timer.tick], read_status, None, shown, show_progress="hidden")
    name.focus(list_models, None, name, show_progress="hidden")
    load.click(show_user_errors(load_model), name, shown)
    unload.click(unload_model, None, shown)
