"""Shared parts of the tabs: task lists, events, error messages, the signed-in lead, and files.

Files do not pass through Gradio, which would copy them (see `transfers`).
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
"""Arguments of events that show the chosen row: Gradio would drop a choice that is made while the answer to another is
awaited.

A list's event is `change`: its `input` comes twice for a choice, and also for a look at the list that chooses nothing.
"""


def task_list(comparable: bool = False) -> gr.Dropdown:
    """Build a list of tasks, or with `comparable` of tasks whose answers can be compared."""
    choices = [(task.title, name) for name, task in TASKS.items() if task.comparable or not comparable]
    return gr.Dropdown(choices, value=choices[0][1], label="Task")


def show_user_errors(action: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event handler to show a UserError on the page, as text."""

    @functools.wraps(action)
    def run_action(*values: Any) -> Any:
        try:
            return action(*values)
        except UserError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from None

    return run_action


def hide() -> Any:
    """Return the update that hides a part of the page."""
    return gr.update(visible=False)


def shown_if(value: Any) -> Any:
    """Return the update that shows a part of the page if there is a value, such as a selected row."""
    return gr.update(visible=bool(value))


def user_id(services: Services, request: gr.Request) -> int:
    """Return the id of the lead who sent the request."""
    with services.database.read() as session:
        user_id = session.scalar(select(User.id).where(User.name == request.username))
    assert user_id is not None  # the guard has let this user in
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
    """Build a file field. Its value, the event's first input, carries the upload's key.

    The event needs `js=send_file(elem_id)`, which sends the file when the button is pressed.
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
