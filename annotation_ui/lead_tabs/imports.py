"""Import tab: create a batch of items from a file."""

from typing import Any

import gradio as gr
from gradio.components import Component
from sqlalchemy import select

from align.core.errors import counted
from annotation_ui.lead_tabs.common import (
    LAST_COUNTS,
    file_field,
    send_file,
    show_user_errors,
    task_list,
    user_id,
    user_names,
)
from annotation_ui.server.services import Services
from annotation_ui.server.transfers import uploaded
from annotation_ui.store.audit import Actor
from annotation_ui.store.importing import MAX_BYTES, NewBatch, import_file
from annotation_ui.store.leases import ATTENTION_EVERY
from annotation_ui.store.schema import RuleSet
from annotation_ui.tasks import TASKS, task_settings
from annotation_ui.tasks.base import Setting

_ABOUT = (
    "One JSON object per line: prompts, or the output of `align sample`. A row with a known answer (`gold`) is an attention "
    'item, which is mixed into every labeler\'s work. With `"training": true`, it is a training item: it precedes the work, '
    "and the known answer is shown after the labeler's answer, with the row's `explanation`."
)


def import_tab(services: Services) -> None:
    """Build the form that imports a batch from a file. It shows only the settings of the selected task."""
    gr.Markdown(_ABOUT)
    file = file_field("import-file", "JSON Lines", (".jsonl",), MAX_BYTES)
    with gr.Row():
        name = gr.Textbox(label="Batch name", placeholder="file name", max_length=128)
        task = task_list()
        rules = gr.Dropdown([], label="Rule set", visible=False)
    with gr.Row():
        labelers_per_item = gr.Number(1, label="Labelers per item", precision=0, minimum=1)
        priority = gr.Number(0, label="Priority (higher first)", precision=0)
        attention = gr.Number(ATTENTION_EVERY, label="Items per attention item", precision=0, minimum=1)
    with gr.Row():
        own_fields = [_setting_field(setting) for _, setting in task_settings()]
    labelers = gr.Dropdown([], value=[], multiselect=True, label="Assigned labelers (empty: all)")
    button, result = gr.Button("Import", variant="primary"), gr.Markdown()

    def import_batch(request: gr.Request, upload: str, name: str, task: str, rule_set: str | None, *values: Any) -> str:
        labelers_per_item, priority, attention, labelers, *of_tasks = values
        settings = {
            setting.name: value
            for (owner, setting), value in zip(task_settings(), of_tasks, strict=True)
            if owner.name == task and value
        }
        if attention and int(attention) != ATTENTION_EVERY:
            settings["attention_every"] = int(attention)
        rules = rule_set if TASKS[task].needs_rules else None
        with uploaded(services.settings, upload) as path:
            called, given_to = name.strip() or path.stem, tuple(labelers or ())
            batch = NewBatch(called, task, int(labelers_per_item or 1), int(priority or 0), rules, settings, given_to)
            count = import_file(services.database, batch, path, path.name, Actor(user_id(services, request)))
            return f"Imported {counted(count, 'item')}."

    def list_rule_sets(**more: Any) -> Any:
        with services.database.read() as session:
            names = session.scalars(select(RuleSet.name).distinct().order_by(RuleSet.name)).all()
        return gr.update(choices=names, **more)

    def show_fields(task: str) -> list[Any]:
        own = [gr.update(visible=owner.name == task) for owner, _ in task_settings()]
        return [list_rule_sets(visible=TASKS[task].needs_rules), *own]

    fields = [file, name, task, rules, labelers_per_item, priority, attention, labelers, *own_fields]
    button.click(show_user_errors(import_batch), fields, result, js=send_file("import-file"))
    labelers.focus(lambda: gr.update(choices=user_names(services)), None, labelers, show_progress="hidden")
    rules.focus(list_rule_sets, None, rules, show_progress="hidden")
    task.change(show_fields, task, [rules, *own_fields], **LAST_COUNTS)


def _setting_field(setting: Setting) -> Component:
    """Build the field of a task's setting, hidden until its task is selected."""
    if setting.kind is bool:
        return gr.Checkbox(label=setting.label, visible=False)
    if setting.kind is int:
        return gr.Number(None, label=setting.label, precision=0, visible=False)
    return gr.Textbox(label=setting.label, visible=False)
