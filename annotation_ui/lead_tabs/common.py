"""Shared parts of the tabs: task lists, events, error messages, the signed-in lead, and files.

Files bypass Gradio, which would copy them (see `transfers`).
"""

import functools
import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from sqlalchemy import select

from align.core.errors import UserError
from annotation_ui.server.services import Services
from annotation_ui.store.schema import Batch, User
from annotation_ui.tasks import TASKS

LAST_COUNTS: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
"""Options of events that show the selected row. By default, Gradio drops a selection made while an earlier one is pending.

Use the `change` event of a dropdown: `input` fires twice per selection, and also if the list is closed without one.
"""


def task_list(comparable: bool = False) -> gr.Dropdown:
    """Build a dropdown of tasks. With `comparable`, include only tasks whose answers can be compared."""
    choices = [(task.title, name) for name, task in TASKS.items() if task.comparable or not comparable]
    return gr.Dropdown(choices, value=choices[0][1], label="Task")


def show_user_errors(action: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event handler so that a UserError is shown on the page as plain text."""

    @functools.wraps(action)
    def run_action(*values: Any) -> Any:
        try:
            return action(*values)
        except UserError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from None

    return run_action


def hide() -> Any:
    """Return an update that hides a component."""
    return gr.update(visible=False)


def shown_if(value: Any) -> Any:
    """Return an update that shows a component if `value` is truthy and hides it otherwise."""
    return gr.update(visible=bool(value))


def user_id(services: Services, request: gr.Request) -> int:
    """Return the id of the lead who sent the request."""
    with services.database.read() as session:
        user_id = session.scalar(select(User.id).where(User.name == request.username))
    assert user_id is not None  # the guard has authenticated the user
    return user_id


def batch_names(services: Services) -> list[str]:
    """Return the names of all batches that are not deleted, oldest first."""
    with services.database.read() as session:
        return list(session.scalars(select(Batch.name).where(Batch.deleted_at.is_(None)).order_by(Batch.id)))


def user_names(services: Services) -> list[str]:
    """Return the names of all users."""
    with services.database.read() as session:
        return list(session.scalars(select(User.name).order_by(User.name)))


def file_field(elem_id: str, label: str, suffixes: tuple[str, ...], most_bytes: int) -> gr.Textbox:
    """Build a file field and return the hidden textbox for the upload key.

    The textbox must be the first input of the event, and the event needs `js=send_file(elem_id)`, which uploads the file.
    """
    gr.HTML(
        f'<label class="file-field"><span>{html.escape(label)}</span> '
        f'<input type="file" accept="{",".join(suffixes)}" data-most="{most_bytes}"></label>',
        elem_id=elem_id,
    )
    return gr.Textbox(visible=False)


def send_file(elem_id: str) -> str:
    """Return the JavaScript that uploads the file and sets the event's first input to its key."""
    files = "await import(new URL('../ui/files.js', document.baseURI))"
    return f"async (_, ...rest) => [await ({files}).upload('{elem_id}'), ...rest]"


def export_links(paths: list[Path]) -> str:
    """Return links to exported files."""
    links = [f'<li><a href="exports/{html.escape(path.name)}" download>{html.escape(path.name)}</a></li>' for path in paths]
    return f'<ul class="downloads">{"".join(links)}</ul>'
