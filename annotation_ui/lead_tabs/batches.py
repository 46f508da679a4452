"""Batches tab: edit the settings and labelers of a batch, delete it, and restore it."""

from dataclasses import dataclass
from typing import Any

import gradio as gr
from sqlalchemy import select

from align.core.errors import UserError, counted
from annotation_ui.lead_tabs.common import batch_names, hide, show_user_errors, shown_if, user_names
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.reports import overview
from annotation_ui.server.services import Services
from annotation_ui.store import batches
from annotation_ui.store.batches import BatchSettings
from annotation_ui.store.schema import Batch

_NO_BATCH = "No batches yet. Import prompts or samples in the Import tab."


def batches_tab(tab: gr.Tab, services: Services) -> None:
    """Build the list of batches and the form to edit a batch."""
    listed = table("Batches (click to edit)", "batches")
    with gr.Column(visible=False) as form:
        with gr.Row():
            name = gr.Textbox(label="Selected batch", interactive=False)
            new_name = gr.Textbox(label="Name", max_length=128)
            labelers_per_item = gr.Number(1, label="Labelers per item", precision=0, minimum=1)
            priority = gr.Number(0, label="Priority (higher first)", precision=0)
            is_open = gr.Checkbox(True, label="Open")
            version = gr.Number(0, visible=False)  # version of the settings shown in the form
        labelers = gr.Dropdown([], value=[], multiselect=True, label="Assigned labelers (empty: all)")
        with gr.Row():
            save, delete = gr.Button("Save", variant="primary"), gr.Button("Delete")
    with gr.Row(visible=False) as confirm:
        question = gr.Markdown()
        yes, no = gr.Button("Yes, delete", variant="stop", scale=0), gr.Button("Cancel", scale=0)
    result = gr.Markdown()
    with gr.Row():
        deleted = gr.Dropdown([], value=None, label="Deleted batches with work")
        restore = gr.Button("Restore", scale=0)

    actions = _BatchActions(services)
    shown = [listed, name, form, labelers, deleted]
    fields = [new_name, labelers_per_item, priority, is_open, labelers, version]
    tab.select(actions.list_batches, name, shown, show_progress="hidden")
    when_picked(listed, actions.pick, [], [name, form, *fields, confirm])
    saved = save.click(show_user_errors(actions.save), [name, *fields], [result, name, version])
    saved.success(actions.list_batches, name, shown, show_progress="hidden")
    delete.click(show_user_errors(actions.ask_to_delete), name, [confirm, question])
    no.click(hide, None, confirm, show_progress="hidden")
    for button, action, chosen in ((yes, actions.delete, name), (restore, actions.restore, deleted)):
        done = button.click(show_user_errors(action), chosen, result)
        listed_again = done.success(actions.list_batches, name, shown, show_progress="hidden")
        listed_again.then(hide, None, confirm, show_progress="hidden")


@dataclass(frozen=True)
class _BatchActions:
    """Event handlers of the tab. Each takes field values and returns updates of other fields."""

    services: Services

    def list_batches(self, name: str | None) -> list[Any]:
        with self.services.database.read() as session:
            deleted = session.scalars(select(Batch.name).where(Batch.deleted_at.is_not(None)).order_by(Batch.id)).all()
            rows = show(overview.progress(session), _NO_BATCH, key="batch", picked=name)
        kept = name if name in batch_names(self.services) else ""
        return [
            rows,
            kept,
            shown_if(kept),
            gr.update(choices=user_names(self.services)),
            gr.update(choices=deleted, value=None),
        ]

    def pick(self, name: str) -> tuple[Any, ...]:
        """Fill the form with the selected batch. Another lead may have renamed or deleted it."""
        with self.services.database.read() as session:
            batch = session.scalar(select(Batch).where(Batch.name == name))
            now = batches.stored_settings(session, batch) if batch else BatchSettings("")
        fields = (now.name, now.labelers_per_item, now.priority, now.open, list(now.labelers))
        return name, shown_if(name), *fields, batch.version if batch else 0, hide()

    def save(
        self,
        name: str | None,
        new_name: str,
        labelers_per_item: float,
        priority: float,
        is_open: bool,
        given_to: list[str],
        seen: float,
    ) -> tuple[str, Any, int]:
        new = BatchSettings(new_name, int(labelers_per_item or 0), int(priority or 0), is_open, tuple(given_to))
        version = batches.change_batch(self.services.database, name or "", new, int(seen))
        return "Saved.", new_name.strip(), version

    def ask_to_delete(self, name: str | None) -> tuple[Any, str]:
        with self.services.database.read() as session:
            rows = [row for row in overview.progress(session) if row["batch"] == name]
            if not rows:
                raise UserError("select a batch first")
            batch = session.scalars(select(Batch).where(Batch.name == name)).one()
            kept = "Its judgments and drafts are kept, and you can restore it." if batches.has_work(session, batch) else ""
        return gr.update(visible=True), f"Delete **this batch** of {counted(rows[0]['items'], 'item')}? {kept}"

    def delete(self, name: str | None) -> str:
        removed = batches.delete_batch(self.services.database, name or "")
        kept = "Its judgments are kept, but not shown or exported. You can restore it below."
        return "Deleted." if removed else f"Deleted. {kept}"

    def restore(self, name: str | None) -> str:
        batches.restore_batch(self.services.database, name or "")
        return "Restored as closed. Select Open to assign its items again."
