"""Raw texts: rows with a `text`, such as pages and books, which have no prompt and no answer."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from align.core.errors import UserError
from align.data.fields import check_id, check_row, check_text, required_field
from align.data.sources import iter_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Text:
    """A document.

    Attributes:
        text: all of it.
        id: the row's id, if it has one.

    Raises:
        UserError: for empty text.
    """

    text: str
    id: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", check_text(self.text, "text"))
        object.__setattr__(self, "id", check_id(self.id))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """From `text`, and `id` if given; other fields are ignored."""
        row = check_row(row)
        return cls(required_field(row, "text", "write the document there"), row.get("id"))


def read_texts(source: str | Sequence[str | Mapping[str, Any]], skip_bad_rows: bool = False) -> Iterator[Text]:
    """The documents of a file, folder or hub name, or of rows or texts in memory.

    Args:
        skip_bad_rows: leave out bad rows, and log how many.

    Raises:
        UserError: for a bad row, and for a source without any document.
    """
    found = bad = 0
    for where, row in _rows(source):
        try:
            text = Text.from_row(row)
        except UserError as error:
            if not skip_bad_rows:
                raise UserError(f"{where}: {error}") from error
            bad += 1
            continue
        found += 1
        yield text
    name = source if isinstance(source, str) else "texts in memory"
    if bad:
        logger.warning("%s: skipped %d bad rows", name, bad)
    if not found:
        raise UserError(f"{name}: no text in it; each row needs a field 'text'")


def _rows(source: str | Sequence[str | Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, str):
        for number, row in enumerate(source, start=1):
            yield f"texts in memory: item {number}", {"text": row} if isinstance(row, str) else row
        return
    for item in iter_rows(source):
        yield item.where, item.row if item.error is None else {}
