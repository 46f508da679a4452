"""Rules and guidelines tab: edit the versioned guidelines of each task, and load rule sets from files."""

from typing import Any

import gradio as gr
from sqlalchemy import func, select

from align.core.errors import counted
from annotation_ui.lead_tabs.common import LAST_COUNTS, file_field, send_file, show_user_errors, task_list, user_id
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.server.services import Services
from annotation_ui.server.transfers import uploaded
from annotation_ui.store import guidelines, rule_sets
from annotation_ui.store.schema import RuleSet

_LOCK = "() => ({ __type__: 'update', interactive: false })"
"""Locks the editor until the event's response fills it. Otherwise text typed in the meantime would be lost."""
_NO_VERSION = "No guidelines for this task yet. The editor contains a draft: edit and save it."


def rules_and_guidelines_tab(tab: gr.Tab, services: Services) -> None:
    """Build the guidelines editor, the list of versions, and the upload of rule files."""
    task = task_list()
    text = gr.Textbox(label="Guidelines (Markdown)", lines=10, max_lines=30, max_length=guidelines.MAX_LENGTH)
    edited = gr.Number(0, visible=False)  # version that was current when the editor was filled
    save, saved = gr.Button("Save guidelines", variant="primary"), gr.Markdown()
    versions = table("Versions (click to open in the editor)", "versions")
    rules = table("Rule sets")
    file = file_field("rules-file", "Rule set (YAML)", (".yaml", ".yml"), rule_sets.MAX_BYTES)
    load, loaded = gr.Button("Load rule set"), gr.Markdown()

    def read(task: str, picked: int | None = None) -> list[Any]:
        """Return the contents of the tab, with a version in the editor. Default: the newest version."""
        with services.database.read() as session:
            known = guidelines.versions(session, task)
            counted = select(RuleSet.name, func.count().label("versions"), func.max(RuleSet.created_at).label("at"))
            sets = session.execute(counted.group_by(RuleSet.name).order_by(RuleSet.name)).mappings().all()
        rows = [
            {"version": number, "at": each.created_at, "by": author, "readers": readers,
             "characters": len(each.text), "first line": each.text.strip().split("\n")[0][:80]}
            for number, each, author, readers in known
        ]  # fmt: skip
        number, text = next(((n, each.text) for n, each, *_ in known if picked in (None, n)), (None, guidelines.draft(task)))
        versions_html = show(rows, _NO_VERSION, key="version", picked=number)
        newest_id = known[0][1].id if known else 0
        editor = gr.update(value=text, interactive=True)
        return [editor, newest_id, versions_html, show([dict(row) for row in sets], "No rule sets yet.")]

    def read_again(task: str, text: str) -> list[Any]:
        """Return the contents when the tab is reopened. Unsaved text stays in the editor."""
        with services.database.read() as session:
            known = [each.text for _, each, *_ in guidelines.versions(session, task)]
        is_own = bool(text) and text not in (guidelines.draft(task), *known)
        return [gr.skip(), gr.skip(), *read(task)[2:]] if is_own else read(task)

    def save_guidelines(task: str, text: str, edited: float, request: gr.Request) -> str:
        guidelines.save(services.database, task, text, user_id(services, request), int(edited))
        return "Saved as a new version. Labelers are notified with their next item."

    def open_version(task: str, number: str) -> list[Any]:
        return read(task, int(number))

    def load_rule_set(upload: str) -> str:
        with uploaded(services.settings, upload) as path:
            rules = rule_sets.read(path, path.name)
        with services.database.write() as session:
            rule_sets.store(session, rules)
        return f"Loaded {counted(len(rules['rules']), 'rule')}."

    shown = [text, edited, versions, rules]
    in_turn: dict[str, Any] = {**LAST_COUNTS, "concurrency_id": "guidelines"}  # events finish in order
    tab.select(read_again, [task, text], shown, **in_turn)
    task.change(None, None, text, js=_LOCK)
    task.change(read, task, shown, **in_turn)
    when_picked(versions, open_version, [task], shown, **in_turn)
    stored = save.click(show_user_errors(save_guidelines), [task, text, edited], saved)
    stored.success(read, task, shown, **in_turn)
    sent = load.click(show_user_errors(load_rule_set), file, loaded, js=send_file("rules-file"))
    sent.success(read_again, [task, text], shown, **in_turn)
