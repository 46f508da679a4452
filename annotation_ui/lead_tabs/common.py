"""What the tabs share: tables, messages, who is asking."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable
from typing import Any

import gradio as gr
import pandas as pd
from sqlalchemy import select

from align.errors import UserError
from annotation_ui.export import plain_cell
from annotation_ui.schema import User
from annotation_ui.services import Services
from annotation_ui.tasks import TASKS

TASK_CHOICES = [(task.title, name) for name, task in TASKS.items()]
AGREED = [(TASKS[name].title, name) for name in ("rank", "rules", "compare")]


def told(action: Callable[..., Any]) -> Callable[..., Any]:
    """A UserError becomes a message on the page, as text."""

    @functools.wraps(action)
    def telling(*values: Any) -> Any:
        try:
            return action(*values)
        except UserError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from None

    return telling


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows for a table whose text no spreadsheet runs when it is copied there."""
    return pd.DataFrame([{k: plain_cell(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows])


def user_id(services: Services, request: gr.Request) -> int:
    with services.database.read() as session:
        user_id = session.scalar(select(User.id).where(User.name == request.username))
    assert user_id is not None  # the guard has let this user in
    return user_id
