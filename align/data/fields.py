"""Checks of single fields. Each returns the value in the form that the records keep, or raises a UserError.

All messages have the form `field 'NAME': what is wrong; what to do`; a reader adds the file and the line in front.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from align.core.errors import UserError, nearest_name

ROUNDING = 1e-3  # tolerance of a sum of two probabilities above 1, for files that round them
SPELLING_SIMILARITY = (
    0.85  # similarity (0 to 1) of an unknown field's name to a known one from which it counts as misspelled
)


def field_error(field: str, wrong: str, remedy: str) -> UserError:
    """The error for a bad field, in one line.

    Args:
        field: its name, with an index for an entry of a list.
        wrong: what is wrong with it, as the predicate of a sentence.
        remedy: what the user should do.
    """
    return UserError(f"field '{field}': {wrong}; {remedy}")


def short_repr(value: object) -> str:
    """A value in an error message: its `repr`, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_row(row: object) -> Mapping[str, Any]:
    """The row, which must map field names to values."""
    if not isinstance(row, Mapping):
        raise UserError(f"the row is {short_repr(row)}, not a JSON object; write one {{...}} per line")
    return row


def required_field(row: Mapping[str, Any], field: str, remedy: str) -> Any:
    """The value of a field that must be given. None counts as missing: Parquet fills missing fields with it.

    Args:
        row: the row of a file.
        field: the name.
        remedy: what the user should do if it is missing.

    Raises:
        UserError: if it is missing.
    """
    value = row.get(field)
    if value is None:
        raise field_error(field, "is missing", remedy)
    return value


def text_or_none(value: object) -> str | None:
    """A value if it is text that is not blank, else None: an odd category is no reason to refuse another project's row."""
    return value if isinstance(value, str) and value.strip() else None


def id_or_none(value: object) -> str | None:
    """An id, given as text or as a whole number, or None if it is neither."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text_or_none(value)


def check_spelling(row: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a field whose name is similar to that of a known one: ignoring it would silently lose a judgment.

    Raises:
        UserError: with the known name.
    """
    names = list(known)
    for field, value in row.items():
        if field in names or value is None:
            continue
        nearest = nearest_name(str(field), names, SPELLING_SIMILARITY)
        if nearest is not None:
            raise field_error(str(field), "is not a known field", f"did you mean '{nearest}'? Rename it, or remove it")


def check_text(value: object, field: str, *, may_be_empty: bool = False) -> str:
    """Text that is not blank and can be encoded as UTF-8. It is not stripped: spaces at the ends are part of the data."""
    if not isinstance(value, str):
        raise field_error(field, f"must be text, not {short_repr(value)}", "write it in quotes")
    if not may_be_empty and not value.strip():
        raise field_error(field, "is empty", "write the text, or remove the row")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "export the text again as UTF-8"
            raise field_error(field, "contains half of a surrogate pair, which is not a character", remedy) from None
    return value


def check_optional_text(value: object, field: str) -> str | None:
    """Like `check_text`, for a field that may be missing."""
    return None if value is None else check_text(value, field)


def check_id(value: object) -> str | None:
    """An id, kept as text; a whole number is accepted because many data sets number their rows."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_optional_text(value, "id")


def check_list(value: object, field: str, count: int | None = None) -> list[Any]:
    """A list, of `count` entries (one for each response) if a count is given."""
    if not isinstance(value, list | tuple):
        raise field_error(field, f"must be a list, not {short_repr(value)}", "write it as [..., ...]")
    if count is not None and len(value) != count:
        raise field_error(field, f"has {len(value)} entries for {count} responses", "give one for each response")
    return list(value)


def check_texts(value: object, field: str, count: int | None = None, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """A list of texts, none empty unless they may be."""
    entries = enumerate(check_list(value, field, count))
    return tuple(check_text(entry, f"{field}[{i}]", may_be_empty=may_be_empty) for i, entry in entries)


def check_whole_numbers(value: object, field: str, count: int, low: int, high: int | None) -> tuple[int, ...]:
    """A list of `count` integers from `low` to `high` (None: no upper limit). True and 1.0 are not integers."""
    entries = check_list(value, field, count)
    allowed = f"from {low} to {high}" if high is not None else f"of {low} or more"
    for i, entry in enumerate(entries):
        whole = isinstance(entry, int) and not isinstance(entry, bool)
        if not whole or entry < low or (high is not None and entry > high):
            raise field_error(f"{field}[{i}]", f"is {short_repr(entry)}", f"use a whole number {allowed}")
    return tuple(entries)


def check_token_ids(value: object, field: str) -> tuple[int, ...]:
    """Token ids, at least one; which of them exist depends on the tokenizer."""
    ids = check_list(value, field)
    if not ids:
        raise field_error(field, "is empty", "write the ids, or remove the row")
    return check_whole_numbers(ids, field, len(ids), 0, None)


def attended_ids(ids: object, mask: object) -> tuple[Any, ...]:
    """Token ids without those that an attention mask leaves out, which are padding; no mask (None) leaves out none."""
    given = check_list(ids, "input_ids")
    if mask is None:
        return tuple(given)
    kept = check_list(mask, "attention_mask")
    if len(kept) != len(given) or any(entry not in (0, 1) for entry in kept):
        wrong = f"does not hold a 0 or 1 for each of {len(given)} input_ids"
        raise field_error("attention_mask", wrong, "correct it, or remove the field")
    return tuple(token for token, is_read in zip(given, kept, strict=True) if is_read)


def check_attributes(value: object) -> dict[str, float]:
    """Finite numbers by name, at least one; null counts as absent, as Parquet writes it."""
    if not isinstance(value, Mapping):
        raise field_error("attributes", f"must be an object, not {short_repr(value)}", 'write {"name": number, ...}')
    found = {str(name): number for name, number in value.items() if number is not None}
    for name, number in found.items():
        if not isinstance(number, int | float) or not math.isfinite(float(number)):
            raise field_error(f"attributes.{name}", f"is {short_repr(number)}", "use a finite number")
    if not found:
        raise field_error("attributes", "is empty", "give at least one, or remove the row")
    return {name: float(number) if isinstance(number, float) else int(number) for name, number in found.items()}


def check_margin(value: object) -> float:
    """How much better the first response of a pair is: a finite number that is not negative."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(float(value)) or float(value) < 0:  # type: ignore[arg-type]
        raise field_error("margin", f"is {short_repr(value)}", "use a finite number that is 0 or more, or leave it out")
    return float(value)  # type: ignore[arg-type]


def check_preferences(value: object, count: int) -> tuple[tuple[float, ...], ...]:
    """The probability that response i beats j, for `count` responses; what (i, j) and (j, i) leave of 1 is a tie."""
    rows = [check_list(row, f"preferences[{i}]", count) for i, row in enumerate(check_list(value, "preferences", count))]
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            number = isinstance(entry, int | float) and not isinstance(entry, bool)
            if not number or not 0 <= entry <= 1:
                raise field_error(f"preferences[{i}][{j}]", f"is {short_repr(entry)}", "use a number from 0 to 1")
            if i == j and entry:
                raise field_error(
                    f"preferences[{i}][{j}]", f"is {short_repr(entry)}", "no response is better than itself: use 0"
                )
            if j < i and entry + rows[j][i] > 1 + ROUNDING:
                wrong = f"and preferences[{j}][{i}] are {entry} and {rows[j][i]}, more than 1 together"
                raise field_error(
                    f"preferences[{i}][{j}]", wrong, "lower one; what is left of 1 is the probability of a tie"
                )
    return tuple(tuple(map(float, row)) for row in rows)


def check_flags(value: object, count: int) -> tuple[str, ...] | tuple[tuple[str, ...], ...]:
    """Flags: names for the whole ranking (`["unclear"]`), or a list of names for each of the `count` responses."""
    entries = check_list(value, "flags")
    if any(isinstance(entry, list | tuple) for entry in entries):
        per_response = check_list(entries, "flags", count)
        return tuple(check_texts(entry, f"flags[{i}]") for i, entry in enumerate(per_response))
    return check_texts(entries, "flags")
