"""Rows of CSV files, as spreadsheets and pandas write them. Every cell is text but those of columns that never are."""

import csv
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

from align.core.errors import UserError

STRUCTURED = {
    "messages", "responses", "ranks", "ratings", "preferences", "flags", "margin", "attributes", "answers", "completions",
    "labels", "label", "kto_tag", "weight", "train", "score_chosen", "score_rejected",
    "history", "input_ids", "attention_mask", "tools", "images",
}  # fmt: skip
"""Columns whose cells are JSON: numbers, truth values, lists, objects."""
TURNS = frozenset(("prompt", "completion", "chosen", "rejected"))
"""Columns whose cells are text, or a JSON list of turns."""
SEPARATORS = ",;\t"


def csv_rows(text: IO[str], label: str) -> Iterator[dict[str, Any] | str]:
    """The rows below the header; a row that has another number of cells is an error message instead.

    The separator is the comma, semicolon or tab that the header holds most of. An empty cell counts as absent, and so does a
    column without a name, in which pandas writes the index.

    Args:
        text: the file, opened with `newline=""`.
        label: its name, for messages.

    Raises:
        UserError: for a header with a name twice, or broken quotes.
    """
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is shorter than a long document
    start = text.readline()
    separator = max(SEPARATORS, key=start.count)
    try:
        header = next(csv.reader([start], delimiter=separator, strict=True), [])
        names = [name.strip() for name in header]
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{label}: the header has the column '{twice}' twice; rename one")
        for cells in csv.reader(text, delimiter=separator, strict=True):
            if not cells:
                continue
            if len(cells) != len(names):
                yield f"has {len(cells)} cells, and the header has {len(names)}; put cells with '{separator}' in quotes"
                continue
            yield {name: _value(name, cell) for name, cell in zip(names, cells, strict=True) if name and cell}
    except csv.Error as error:
        raise UserError(f"{label}: broken CSV ({error}); write it again, with quotes inside of cells doubled") from error


def _value(name: str, cell: str) -> Any:
    is_turns = name in TURNS and cell.lstrip().startswith("[{")
    if name not in STRUCTURED and not is_turns:
        return cell
    try:
        return json.loads(cell.lower() if cell in ("True", "False") else cell)
    except (ValueError, RecursionError):
        return cell  # a check of the row names what is wrong with it
