"""Serialization of exported rows: JSON Lines and Parquet for training, CSV for spreadsheets."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from align.core.errors import UserError
from align.core.files import new_file
from align.data.conversation import ANSWERS, unambiguous
from annotation_ui.rendering.markdown import as_messages
from annotation_ui.tasks import Json

_FORMULA = tuple("=+-@＝＋－＠")  # characters that start a formula, also in full width


def to_jsonl(rows: list[Json]) -> bytes:
    """Serialize rows as JSON Lines."""
    return "".join(json.dumps(unambiguous(row), ensure_ascii=False) + "\n" for row in rows).encode()


def assistant_turns(answer: Any) -> Any:
    """Return an answer as a list with one message."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def to_parquet(rows: list[Json]) -> bytes:
    """Serialize rows as Parquet. If prompts or answers mix strings and lists of messages, convert all to lists."""
    import pyarrow
    import pyarrow.parquet

    rows = [unambiguous(row) for row in rows]
    for field in ANSWERS:
        if any(isinstance(row.get(field), list) for row in rows):
            rows = [{**row, field: assistant_turns(row[field])} if field in row else row for row in rows]
    if len({isinstance(row["prompt"], str) for row in rows}) > 1:
        rows = [{**row, "prompt": as_messages(row["prompt"])} for row in rows]
    columns = sorted({field for row in rows for field in row})
    table = pyarrow.Table.from_pylist([{field: row.get(field) for field in columns} for row in rows])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def to_csv(rows: list[Json], columns: Sequence[str] = ()) -> bytes:
    """Serialize rows as CSV without formulas, for spreadsheets. Excel needs the byte order mark to detect UTF-8."""
    columns = columns or sorted({field for row in rows for field in row})
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([plain_cell(row.get(field)) for field in columns])
    return text.getvalue().encode("utf-8-sig")


def plain_cell(value: Any) -> str:
    """Return a value as text that spreadsheets do not run as a formula."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text.lstrip()[:1] in _FORMULA or text[:1] in ("\t", "\r", "\n") else text


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    try:
        with new_file(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error


FORMATS: dict[str, Callable[[list[Json]], bytes]] = {"jsonl": to_jsonl, "parquet": to_parquet, "csv": to_csv}
"""Serializers by file suffix."""
