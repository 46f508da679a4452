"""Answers of a chat become items of the labeling app, in which labelers rank them."""

import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from align.core.errors import UserError
from align.data.conversation import Conversation, to_json

if TYPE_CHECKING:
    from annotation_ui.store.database import Database


def open_database(place: str) -> "Database":
    """Open the database of the labeling app and bring it to the newest schema.

    Args:
        place: a URL, an SQLite file, or the folder of `align annotate --data-dir`.

    Raises:
        UserError: if it does not exist or cannot be opened, or the labeling app is not installed.
    """
    try:
        from annotation_ui.store.database import Database, sqlite_url
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; install the extra: pip install 'align-rlhf[ui]'") from error
    kind, _, file = place.partition(":///")
    path = Path(file if kind == "sqlite" else place)
    if (kind == "sqlite" or ":" not in place) and not path.exists():
        raise UserError(f"annotate {place}: no such file or folder; give the folder of align annotate --data-dir")
    database = Database(place if ":" in place else sqlite_url(path) if path.is_dir() else f"sqlite:///{place}")
    database.upgrade()
    return database


def send_answers(database: "Database", items: Sequence[tuple[Conversation, Sequence[tuple[str, str]]]]) -> str:
    """Store the answers to each conversation as an item of the task rank, and return the name of the new batch.

    Args:
        items: each a conversation and (model, answer) pairs, with at least two different answers.

    Raises:
        UserError: if a conversation has fewer, or the database cannot be written.
    """
    from annotation_ui.store.importing import NewBatch, import_rows

    name = f"chat {datetime.now():%Y-%m-%d %H:%M:%S} {secrets.token_hex(2)}"
    rows = [
        (
            f"conversation {number}",
            {
                "prompt": to_json(conversation),
                "responses": [text for _, text in pairs],
                "model": [model for model, _ in pairs],
            },
        )
        for number, (conversation, pairs) in enumerate(items, start=1)
    ]
    import_rows(database, NewBatch(name=name, task="rank"), rows)
    return name
