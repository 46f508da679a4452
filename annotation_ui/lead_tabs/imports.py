"""The Import tab: a new batch of items from a file."""

from __future__ import annotations

from typing import Any

import gradio as gr
from sqlalchemy import select

from annotation_ui.importing import MAX_BYTES, NewBatch, import_file
from annotation_ui.lead_tabs.common import TASK_CHOICES, show_user_errors, user_names
from annotation_ui.lead_tabs.files import file_field, send_file
from annotation_ui.leases import ATTENTION_EVERY
from annotation_ui.schema import RuleSet
from annotation_ui.services import Services
from annotation_ui.tasks import TASKS
from annotation_ui.transfers import uploads_of

_ABOUT = (
    "One JSON object per line: prompts, or the output of `align sample`. A row with a known answer under `gold` is mixed "
    'into the work of every labeler as an attention item; with `"training": true` it comes before the work, and its answer '
    "is shown afterwards, with the row's `explanation`."
)


def import_tab(services: Services) -> None:
    """Build the form that makes a batch from a file."""
    gr.Markdown(_ABOUT)
    file = file_field("import-file", "JSON Lines", (".jsonl",), MAX_BYTES)
    with gr.Row():
        name = gr.Textbox(label="Name of the batch", max_length=128)
        task = gr.Dropdown(TASK_CHOICES, value="rank", label="Task")
        rules = gr.Dropdown([], label="Rule set (Judge rules, Probe a model)")
    with gr.Row():
        overlap = gr.Number(1, label="Labelers for each item", precision=0, minimum=1)
        priority = gr.Number(0, label="Priority (higher first)", precision=0)
        attention = gr.Number(ATTENTION_EVERY, label="One attention item in so many items", precision=0, minimum=1)
        one_rule = gr.Checkbox(label="One item for each rule")
    with gr.Row():
        min_words = gr.Number(None, label="Minimum words (hint)", precision=0)
        max_words = gr.Number(None, label="Maximum words (hint)", precision=0)
        checkpoint = gr.Textbox(label="Model to probe (empty: the one loaded on the Model tab)")
    labelers = gr.Dropdown([], value=[], multiselect=True, label="Give it to (nobody named: everybody)")
    button, result = gr.Button("Import", variant="primary"), gr.Markdown()

    def import_batch(upload: str, name: str, task: str, rule_set: str | None, *values: Any) -> str:
        overlap, priority, attention, one_rule, min_words, max_words, checkpoint, labelers = values
        attention_every = int(attention or ATTENTION_EVERY)
        chosen = {
            "attention_every": attention_every if attention_every != ATTENTION_EVERY else None,
            "one_rule_each": one_rule,
            "min_words": min_words,
            "max_words": max_words,
            "checkpoint": checkpoint,
        }
        settings = {key: value for key, value in chosen.items() if value}
        uses_rules = TASKS[task].needs_rules
        rules = rule_set if uses_rules else None
        batch = NewBatch(name, task, int(overlap or 1), int(priority or 0), rules, settings, tuple(labelers or ()))
        with uploads_of(services.settings).use(upload) as path:
            return f"Imported {import_file(services.database, batch, path, path.name)} items."

    def list_rule_sets() -> Any:
        with services.database.read() as session:
            names = session.scalars(select(RuleSet.name).distinct().order_by(RuleSet.name)).all()
        return gr.update(choices=names)

    fields = [file, name, task, rules, overlap, priority, attention, one_rule, min_words, max_words, checkpoint, labelers]
    button.click(show_user_errors(import_batch), fields, result, js=send_file("import-file"))
    labelers.focus(lambda: gr.update(choices=user_names(services)), None, labelers, show_progress="hidden")
    gr.on([rules.focus, task.change], list_rule_sets, None, rules, show_progress="hidden")
