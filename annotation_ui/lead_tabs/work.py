"""What the labelers get: imports, batches, rules and guidelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from sqlalchemy import select

from align.errors import UserError
from annotation_ui import rule_sets
from annotation_ui.importing import NewBatch, change_batch, import_file
from annotation_ui.lead_tabs.common import TASK_CHOICES, told, user_id
from annotation_ui.schema import Batch, Guideline, RuleSet
from annotation_ui.services import Services
from annotation_ui.tasks import TASKS


def import_tab(services: Services) -> None:
    gr.Markdown("One JSON object a line: prompts, or what `align sample` writes. `gold` holds a known answer.")
    file = gr.File(label="JSON Lines", file_types=[".jsonl"], type="filepath")
    with gr.Row():
        name = gr.Textbox(label="Name of the batch", max_length=128)
        task = gr.Dropdown(TASK_CHOICES, value="rank", label="Task")
        rules = gr.Dropdown([], label="Rule set (rules, probe)")
    with gr.Row():
        overlap = gr.Number(1, label="Labelers for each item", precision=0, minimum=1)
        priority = gr.Number(0, label="Priority (higher first)", precision=0)
        one_rule = gr.Checkbox(label="One item for each rule")
    with gr.Row():
        least = gr.Number(None, label="Words at least (hint)", precision=0)
        most = gr.Number(None, label="Words at most (hint)", precision=0)
        checkpoint = gr.Textbox(label="Model to probe (none: the loaded one)")
    button, said = gr.Button("Import", variant="primary"), gr.Markdown()

    def load(path: str | None, name: str, task: str, rule_set: str | None, *values: Any) -> str:
        overlap, priority, one_rule, least, most, checkpoint = values
        if not path:
            raise UserError("choose a file first")
        chosen = {"one_rule_each": one_rule, "min_words": least, "max_words": most, "checkpoint": checkpoint}
        settings = {key: value for key, value in chosen.items() if value}
        uses_rules = TASKS[task].needs_rules
        batch = NewBatch(name, task, int(overlap or 1), int(priority or 0), rule_set if uses_rules else None, settings)
        return f"Imported {import_file(services.database, batch, Path(path), Path(path).name)} items."

    def rule_choices() -> Any:
        with services.database.read() as session:
            names = session.scalars(select(RuleSet.name).distinct().order_by(RuleSet.name)).all()
        return gr.update(choices=names)

    fields = [file, name, task, rules, overlap, priority, one_rule, least, most, checkpoint]
    button.click(told(load), fields, said)
    gr.on([rules.focus, task.input], rule_choices, None, rules, show_progress="hidden")


def batches_tab(page: gr.Blocks, services: Services) -> None:
    with gr.Row():
        name = gr.Dropdown([], label="Batch")
        overlap = gr.Number(1, label="Labelers for each item", precision=0, minimum=1)
        priority = gr.Number(0, label="Priority (higher first)", precision=0)
        is_open = gr.Checkbox(True, label="Open")
    button, said = gr.Button("Save", variant="primary"), gr.Markdown()

    def names() -> Any:
        with services.database.read() as session:
            return gr.update(choices=session.scalars(select(Batch.name).order_by(Batch.id)).all())

    def chosen(name: str | None) -> tuple[Any, Any, Any]:
        with services.database.read() as session:
            batch = session.scalar(select(Batch).where(Batch.name == name))
        return (batch.overlap, batch.priority, batch.open) if batch else (1, 0, True)

    def save(name: str | None, overlap: float, priority: float, is_open: bool) -> str:
        change_batch(services.database, name or "", int(overlap), int(priority), is_open)
        return "Saved."

    gr.on([page.load, name.focus], names, None, name, show_progress="hidden")
    name.input(chosen, name, [overlap, priority, is_open])
    button.click(told(save), [name, overlap, priority, is_open], said)


def texts_tab(page: gr.Blocks, services: Services) -> None:
    task = gr.Dropdown(TASK_CHOICES, value="rank", label="Task")
    text = gr.Textbox(label="Guidelines (Markdown)", lines=12, max_lines=30, max_length=100_000)
    save, saved = gr.Button("Save guidelines", variant="primary"), gr.Markdown()
    file = gr.File(label="Rule set (YAML)", file_types=[".yaml", ".yml"], type="filepath")
    load, loaded = gr.Button("Load rule set"), gr.Markdown()

    def newest(task: str) -> str:
        with services.database.read() as session:
            query = select(Guideline.text).where(Guideline.task == task).order_by(Guideline.id.desc()).limit(1)
            return session.scalar(query) or ""

    def store(task: str, text: str, request: gr.Request) -> str:
        author = user_id(services, request)
        with services.database.write() as session:
            session.add(Guideline(task=task, text=text, author_id=author))
        return "Saved as a new version."

    def load_rules(path: str | None) -> str:
        if not path:
            raise UserError("choose a file first")
        rules = rule_sets.read(Path(path), Path(path).name)
        with services.database.write() as session:
            rule_sets.store(session, rules)
        return f"Loaded {len(rules['rules'])} rules."

    gr.on([page.load, task.input], newest, task, text, show_progress="hidden")
    save.click(store, [task, text], saved)
    load.click(told(load_rules), file, loaded)
