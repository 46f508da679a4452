"""Rows of CSV files and Excel sheets."""

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any

from align.core.errors import UserError, first_line, nearest_name_hint
from align.core.plugins import install_hint
from align.data.fields import SCORES

STRUCTURED = {
    "messages", "responses", "ranks", "ratings", "rating", "preferences", "flags", "margin", "attributes", "answers",
    "completions", "labels", "label", "kto_tag", "weight", "train", "helpfulness", "preference_strength",
    "overall_preference", "choice", "better_response_id", "score_0", "score_1", "conversations", "conversation", "history",
    "input_ids", "attention_mask", "tools", "images", "finish_reason", "conversation_a", "conversation_b", "turns", "turn",
    "data", "annotations", "fields", "preference", "passages", "decision", "overruled",
    *(name for pair in SCORES for name in pair),
}  # fmt: skip
"""Fields whose cells contain JSON: numbers, booleans, lists, objects."""
TURNS = frozenset(("prompt", "completion", "chosen", "rejected"))
"""Fields whose cells contain text or a JSON list of turns."""
SEPARATORS = ",;\t"
MAX_HEADER = 1_000_000  # characters; a longer header has an unclosed quote
_SEPARATOR_LINE = re.compile(r'"?sep=([^\r\n"])"?[,;\t]*[\r\n]*', re.IGNORECASE)
_LINE_BREAKS = re.compile(r"\s*[\r\n]+\s*")


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with mapped columns renamed to their fields, replacing existing ones."""
    for column in columns.values():
        if column not in row:
            known = [str(name) for name in row]
            hint = nearest_name_hint(column, known) or f"; it has {', '.join(known) or 'none'}"
            raise UserError(f"no column '{column}'{hint}")
    kept = {name: value for name, value in row.items() if name not in columns.values() and name not in columns}
    return {**kept, **{field: row[column] for field, column in columns.items()}}


def csv_rows(stream: IO[bytes], label: str) -> Iterator[dict[str, str | None] | UserError]:
    """Yield the rows of a CSV file, as written by spreadsheets and pandas, and the errors of bad rows.

    The separator is set by a first line `sep=;` (Excel), or is the most frequent of comma, semicolon and tab in the header.
    `label` is the file name for messages.
    """
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is too small for long documents
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")  # Excel writes a byte order mark
    line = 1  # line number of the next row
    try:
        start = text.readline()
        if "\0" in start:
            raise UserError(f"{label}: encoded as UTF-16; save it as CSV UTF-8")
        before = 0  # number of lines before the reader starts
        named = _SEPARATOR_LINE.fullmatch(start)
        if named:
            start, before, line = text.readline(), 1, 2
        separators = named[1] if named else SEPARATORS
        while _unquoted(start, separators)[1] and len(start) < MAX_HEADER and (more := text.readline()):
            start += more
        separator = max(separators, key=_unquoted(start, separators)[0].count)
        reader = csv.reader(chain(io.StringIO(start, newline=""), text), delimiter=separator, strict=True)
        names = _header(next(reader, []), label)
        line = reader.line_num + before + 1
        for cells in reader:
            line = reader.line_num + before + 1
            if len(cells) == len(names):
                yield _row(names, cells)
            elif cells:
                wrong = f"has {len(cells)} cells, but the header has {len(names)}"
                yield UserError(f"{wrong}; quote cells that contain '{separator}'")
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as CSV UTF-8") from error
    except csv.Error as error:
        remedy = "double the quotes inside cells"
        raise UserError(f"{label}:{line}: invalid CSV ({error}); {remedy}") from error


def _unquoted(header: str, separators: str) -> tuple[str, bool]:
    """Return the header text outside quoted cells, and whether the last quoted cell continues on the next line."""
    quoted = re.compile(rf'(?:\A|(?<=[{re.escape(separators)}\r\n]))"(?:[^"]|"")*("|\Z)')
    return quoted.sub("", header), any(not cell[1] for cell in quoted.finditer(header))


def excel_rows(path: Path, label: str) -> Iterator[dict[str, str | None] | UserError]:
    """Yield the rows of the first sheet of an Excel file, and errors, like `csv_rows`.

    Cells are read as text: "NA" is not a missing value, and a number in a text column is its digits. Formulas have the
    value that was saved with them.
    """
    try:
        from openpyxl import load_workbook
    except ModuleNotFoundError as error:
        remedy = f"save the sheet as CSV UTF-8, or {install_hint('xlsx')}"
        raise UserError(f"{label}: Excel files need openpyxl; {remedy}") from error
    try:
        book = load_workbook(path, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # the stated size may be wrong and would cut off rows
        sheet_rows = sheet.iter_rows()
    except Exception as error:  # from zipfile, the XML parser, or a KeyError for a missing part
        raise UserError(f"{label}: invalid Excel file ({first_line(error)}); save it as .xlsx again") from error
    try:
        names = _header([_cell_text(cell.value) for cell in next(sheet_rows, ())], label)
        for cells in sheet_rows:
            broken = next((cell for cell in cells if cell.data_type == "e"), None)
            texts = [_cell_text(cell.value) for cell in cells]
            if broken is not None:
                yield UserError(f"cell {broken.coordinate} contains the error {broken.value}; fix the formula")
            elif any(texts[len(names) :]):
                count = max(number for number, text in enumerate(texts, 1) if text)
                wrong = f"has {count} cells, but the header has {len(names)}"
                yield UserError(f"{wrong}; name the columns or remove the cells")
            elif any(texts):
                yield _row(names, [text for text, _ in zip_longest(texts, names, fillvalue="")])
    finally:
        book.close()


def _header(cells: Sequence[str], label: str) -> list[str]:
    names = [_LINE_BREAKS.sub(" ", name.strip()) for name in cells]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{label}: duplicate column '{twice}'; rename one")
    return names


def _row(names: Sequence[str], cells: Sequence[str]) -> dict[str, str | None]:
    """Convert cells to a row. Empty cells become None; unnamed columns (pandas' index) are dropped."""
    return {name: cell or None for name, cell in zip(names, cells, strict=False) if name}


def read_cell(field: str, cell: str | None) -> Any:
    """Parse a cell: text, or JSON for fields that are not text."""
    may_be_turns = field in TURNS and cell is not None and cell.lstrip().startswith("[")
    if cell is None or (field not in STRUCTURED and not may_be_turns):
        return cell
    try:
        value = json.loads(cell.lower() if cell in ("True", "False", "TRUE", "FALSE") else cell)
    except (ValueError, RecursionError):
        return cell  # reported when the row is validated
    return value if field in STRUCTURED or _are_turns(value) else cell


def _are_turns(value: object) -> bool:
    """Return whether a decoded cell is a list of turns. Other JSON in a text column is text, such as an answer in JSON."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value)
    )


def _cell_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()  # as Excel shows it
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.isoformat() if isinstance(value, datetime | date | time) else str(value)
