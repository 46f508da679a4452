"""Checks of single fields. Each returns the value in the form that the records keep, or says what is wrong with it.

Every complaint has one shape, `field 'NAME': what is wrong; what to do`, so that a reader only has to put the file and
the line in front of it.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from align.errors import UserError


def field_error(field: str, wrong: str, remedy: str) -> UserError:
    """The error for a bad field, on one line whatever the value was."""
    return UserError(f"field '{field}': {wrong}; {remedy}")


def shown(value: object) -> str:
    """A short one-line picture of a value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_row(row: object) -> Mapping[str, Any]:
    """A row must be a mapping of field names to values."""
    if not isinstance(row, Mapping):
        raise UserError(f"the row is {shown(row)}, not a JSON object; write one {{...}} a line")
    return row


def require(row: Mapping[str, Any], field: str, remedy: str) -> Any:
    """The value of a field that must be there. None counts as absent: Parquet fills missing fields with it."""
    value = row.get(field)
    if value is None:
        raise field_error(field, "is missing", remedy)
    return value


def check_spelling(row: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a field whose name is nearly that of a known one: dropping it silently would lose a judgement."""
    names = list(known)
    for field in row:
        near = [] if field in names else difflib.get_close_matches(str(field), names, n=1, cutoff=0.85)
        if near and row[field] is not None:
            raise field_error(str(field), "is not a known field", f"did you mean '{near[0]}'? Rename it, or remove it")


def check_text(value: object, field: str, *, may_be_empty: bool = False) -> str:
    """Text with something in it, that UTF-8 can hold. Kept as it is: spaces at the ends are part of the data."""
    if not isinstance(value, str):
        raise field_error(field, f"must be text, not {shown(value)}", "write it in quotes")
    if not may_be_empty and not value.strip():
        raise field_error(field, "is empty", "write the text, or remove the row")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "export the text again as UTF-8"
            raise field_error(field, "holds half of a surrogate pair, which is no character", remedy) from None
    return value


def check_optional_text(value: object, field: str) -> str | None:
    """Like `check_text`, for a field that may be absent."""
    return None if value is None else check_text(value, field)


def check_id(value: object) -> str | None:
    """An id, kept as text; a whole number is accepted because many data sets number their rows."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_optional_text(value, "id")


def check_list(value: object, field: str, count: int | None = None) -> list[Any]:
    """A list, of `count` entries where a count is given (one for each response)."""
    if not isinstance(value, list | tuple):
        raise field_error(field, f"must be a list, not {shown(value)}", "write it as [..., ...]")
    if count is not None and len(value) != count:
        raise field_error(field, f"has {len(value)} entries for {count} responses", "give one for each response")
    return list(value)


def check_texts(value: object, field: str, count: int | None = None) -> tuple[str, ...]:
    """A list of texts, none empty."""
    return tuple(check_text(entry, f"{field}[{i}]") for i, entry in enumerate(check_list(value, field, count)))


def check_whole_numbers(value: object, field: str, count: int, low: int, high: int | None) -> tuple[int, ...]:
    """A list of `count` integers from `low` to `high` (no upper end: None). True and 1.0 are not integers."""
    entries = check_list(value, field, count)
    meant = f"from {low} to {high}" if high is not None else f"of {low} or more"
    for i, entry in enumerate(entries):
        whole = isinstance(entry, int) and not isinstance(entry, bool)
        if not whole or entry < low or (high is not None and entry > high):
            raise field_error(f"{field}[{i}]", f"is {shown(entry)}", f"use a whole number {meant}")
    return tuple(entries)


def check_margin(value: object) -> float:
    """How much better the first response of a pair is: a finite number that is not negative."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(float(value)) or float(value) < 0:  # type: ignore[arg-type]
        raise field_error("margin", f"is {shown(value)}", "use a finite number that is 0 or more, or leave it out")
    return float(value)  # type: ignore[arg-type]


def check_flags(value: object, count: int) -> tuple[str, ...] | tuple[tuple[str, ...], ...]:
    """Flags: names for the whole ranking (`["unclear"]`), or a list of names for each of the `count` responses."""
    entries = check_list(value, "flags")
    if any(isinstance(entry, list | tuple) for entry in entries):
        per_response = check_list(entries, "flags", count)
        return tuple(check_texts(entry, f"flags[{i}]") for i, entry in enumerate(per_response))
    return check_texts(entries, "flags")
