"""The lead's page at /lead: a Gradio page of tabs. The guard lets only leads through to it and to its API.

Nothing is kept in Gradio's state: every table is read from the database when it is asked for.
"""

from __future__ import annotations

import functools
import html
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
from sqlalchemy import select

from align.errors import UserError
from annotation_ui import overview, rule_sets
from annotation_ui.export import FORMATS, RECORDS, Selection, export, plain_cell
from annotation_ui.importing import NewBatch, import_file
from annotation_ui.schema import ROLES, Batch, Guideline, Item, RuleSet, User
from annotation_ui.services import Services
from annotation_ui.tasks import TASKS

HEAD = '<link rel="stylesheet" href="/ui/theme.css"><link rel="stylesheet" href="/ui/lead.css">'
_TASK_CHOICES = [(task.title, name) for name, task in TASKS.items()]
_AGREED = [(TASKS[name].title, name) for name in ("rank", "rules", "compare")]


def lead_page(services: Services) -> gr.Blocks:
    """All of a lead's work."""
    with gr.Blocks(title="Lead · Labelling", analytics_enabled=False) as page:
        gr.HTML('<h1>Lead</h1><p><a href="/">Label</a> · <a href="/password">Change password</a></p>', elem_id="top")
        with gr.Tab("Overview"):
            _overview_tab(page, services)
        with gr.Tab("Disagreements"):
            _disagreements_tab(page, services)
        with gr.Tab("Import"):
            _import_tab(services)
        with gr.Tab("Batches"):
            _batches_tab(page, services)
        with gr.Tab("Rules and guidelines"):
            _texts_tab(page, services)
        with gr.Tab("Users"):
            _users_tab(page, services)
        with gr.Tab("Export"):
            _export_tab(services)
    return page


def _told(action: Callable[..., Any]) -> Callable[..., Any]:
    """A UserError becomes a message on the page, as text."""

    @functools.wraps(action)
    def telling(*values: Any) -> Any:
        try:
            return action(*values)
        except UserError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from None

    return telling


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows for a table whose text no spreadsheet runs when it is copied there."""
    return pd.DataFrame([{k: plain_cell(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows])


def _overview_tab(page: gr.Blocks, services: Services) -> None:
    with gr.Row():
        task = gr.Dropdown(_TASK_CHOICES, value="rank", label="Task")
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
                _table(rows),
                pd.DataFrame([row for row in rows if row["task"] == task], columns=["batch", "percent"]),
                pd.DataFrame(overview.per_day(session, task), columns=["day", "labeler", "judgments"]),
                _table(overview.labelers(session, task)),
                _table(overview.coefficients(session, task)),
                _table(overview.win_rates(session)),
            ]

    shown = [progress, done, speed, labelers, agreement, wins]
    gr.on([page.load, refresh.click, task.input, gr.Timer(30).tick], show, task, shown, show_progress="hidden")


def _disagreements_tab(page: gr.Blocks, services: Services) -> None:
    with gr.Row():
        task = gr.Dropdown(_AGREED, value="rank", label="Task")
        refresh = gr.Button("Refresh", scale=0)
    table = gr.Dataframe(label="Items on which labelers differ, worst first", interactive=False, wrap=True)
    with gr.Row():
        item = gr.Dropdown([], label="Item to decide")
        decide = gr.Button("Decide it", variant="primary", scale=0)

    def show(task: str) -> tuple[pd.DataFrame, Any]:
        with services.database.read() as session:
            rows = overview.disagreements(session, task)
        choices = [(f"{row['item']} ({row['agreement']:.2f}) {row['prompt'][:60]}", row["item"]) for row in rows]
        return _table(rows), gr.update(choices=choices, value=choices[0][1] if choices else None)

    def open_item(item: int | None, request: gr.Request) -> None:
        if item is None:
            raise gr.Error("Choose an item first")
        services.leases.adjudicate(_user_id(services, request), int(item))

    gr.on([page.load, refresh.click, task.input], show, task, [table, item], show_progress="hidden")
    decide.click(open_item, item).success(None, task, js="(task) => window.location.assign('/?task=' + task)")


def _import_tab(services: Services) -> None:
    gr.Markdown("One JSON object a line: prompts, or what `align sample` writes. `gold` holds a known answer.")
    file = gr.File(label="JSON Lines", file_types=[".jsonl"], type="filepath")
    with gr.Row():
        name = gr.Textbox(label="Name of the batch", max_length=128)
        task = gr.Dropdown(_TASK_CHOICES, value="rank", label="Task")
        rules = gr.Dropdown([], label="Rule set (rules, probe)")
    with gr.Row():
        overlap = gr.Number(1, label="Labelers for each item", precision=0, minimum=1)
        priority = gr.Number(0, label="Priority (higher first)", precision=0)
        one_rule = gr.Checkbox(label="One item for each rule")
    with gr.Row():
        least = gr.Number(None, label="Words at least (hint)", precision=0)
        most = gr.Number(None, label="Words at most (hint)", precision=0)
        checkpoint = gr.Textbox(label="Checkpoint to probe")
    button, said = gr.Button("Import", variant="primary"), gr.Markdown()

    def load(path: str | None, name: str, task: str, rule_set: str | None, *values: Any) -> str:
        overlap, priority, one_rule, least, most, checkpoint = values
        if not path:
            raise UserError("choose a file first")
        chosen = {"one_rule_each": one_rule, "min_words": least, "max_words": most, "checkpoint": checkpoint}
        settings = {key: value for key, value in chosen.items() if value}
        uses_rules = TASKS[task].needs_rules
        batch = NewBatch(name, task, int(overlap or 1), int(priority or 0), rule_set if uses_rules else None, settings)
        return f"Imported {import_file(services.database, batch, Path(path))} items."

    def rule_choices() -> Any:
        with services.database.read() as session:
            names = session.scalars(select(RuleSet.name).distinct().order_by(RuleSet.name)).all()
        return gr.update(choices=names)

    fields = [file, name, task, rules, overlap, priority, one_rule, least, most, checkpoint]
    button.click(_told(load), fields, said)
    gr.on([rules.focus, task.input], rule_choices, None, rules, show_progress="hidden")


def _batches_tab(page: gr.Blocks, services: Services) -> None:
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
        change_batch(services, name or "", int(overlap), int(priority), is_open)
        return "Saved."

    gr.on([page.load, name.focus], names, None, name, show_progress="hidden")
    name.input(chosen, name, [overlap, priority, is_open])
    button.click(_told(save), [name, overlap, priority, is_open], said)


def change_batch(services: Services, name: str, overlap: int, priority: int, is_open: bool) -> None:
    """Change what may change of a batch; a lower overlap takes no judgment away."""
    with services.database.write() as session:
        batch = session.scalar(select(Batch).where(Batch.name == name))
        if batch is None:
            raise UserError("choose a batch first")
        if not 1 <= overlap <= 1000:
            raise UserError("overlap: must be 1 to 1000")
        if overlap != batch.overlap:
            for item in session.scalars(select(Item).where(Item.batch_id == batch.id, Item.gold.is_(None))):
                item.needed, item.returned = max(overlap, item.taken), True  # found again by those who have passed it
        batch.overlap, batch.priority, batch.open = overlap, priority, is_open


def _texts_tab(page: gr.Blocks, services: Services) -> None:
    task = gr.Dropdown(_TASK_CHOICES, value="rank", label="Task")
    text = gr.Textbox(label="Guidelines (Markdown)", lines=12, max_lines=30, max_length=100_000)
    save, saved = gr.Button("Save guidelines", variant="primary"), gr.Markdown()
    file = gr.File(label="Rule set (YAML)", file_types=[".yaml", ".yml"], type="filepath")
    load, loaded = gr.Button("Load rule set"), gr.Markdown()

    def newest(task: str) -> str:
        with services.database.read() as session:
            query = select(Guideline.text).where(Guideline.task == task).order_by(Guideline.id.desc()).limit(1)
            return session.scalar(query) or ""

    def store(task: str, text: str, request: gr.Request) -> str:
        author = _user_id(services, request)
        with services.database.write() as session:
            session.add(Guideline(task=task, text=text, author_id=author))
        return "Saved as a new version."

    def load_rules(path: str | None) -> str:
        if not path:
            raise UserError("choose a file first")
        rules = rule_sets.parse(Path(path).read_text(encoding="utf-8", errors="replace"), Path(path).name)
        with services.database.write() as session:
            rule_sets.store(session, rules)
        return f"Loaded {len(rules['rules'])} rules."

    gr.on([page.load, task.input], newest, task, text, show_progress="hidden")
    save.click(store, [task, text], saved)
    load.click(_told(load_rules), file, loaded)


def _users_tab(page: gr.Blocks, services: Services) -> None:
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
        return _table([{"name": u.name, "role": u.role, "active": u.active, "exported as": u.pseudonym} for u in found])

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
        button.click(_told(action), inputs, said).success(users, None, table)


def _export_tab(services: Services) -> None:
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
        made = export(services.database, selection, path, _user_id(services, request))
        return [str(path), f"{path}.manifest.json"], made

    batches.focus(names, None, batches, show_progress="hidden")
    button.click(_told(write), [record, kind, batches, aggregated, gold, tied, since], [files, manifest])


def _user_id(services: Services, request: gr.Request) -> int:
    with services.database.read() as session:
        user_id = session.scalar(select(User.id).where(User.name == request.username))
    assert user_id is not None  # the guard has let this user in
    return user_id
