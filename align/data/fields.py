"""Checks of fields. Each returns the value in the form that the records keep, or raises a UserError that names the field.

A message has the form `field 'NAME': problem; remedy`; a reader prepends the file and the line.
The second half contains the fields of published data that change the meaning of a row. Each is used or rejected, because a
row without its system prompt, its tools or its label still looks valid. Other unknown fields are ignored.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from align.core.errors import UserError, nearest_name, short_repr

ROUNDING = 1e-3  # tolerance for rounded probabilities that sum to more than 1
SPELLING_SIMILARITY = 0.85  # similarity above which an unknown field counts as a misspelling


def field_error(field: str, wrong: str, remedy: str) -> UserError:
    """Return the error for a bad field: `wrong` is the predicate of a sentence, `remedy` an instruction."""
    return UserError(f"field '{field}': {wrong}; {remedy}")


def check_row(row: object) -> Mapping[str, Any]:
    """Return a decoded row, or raise the error that replaces it."""
    if isinstance(row, UserError):
        raise row
    if not isinstance(row, Mapping):
        raise UserError(f"the row is {short_repr(row)}, not a JSON object; write one {{...}} per line")
    return row


class WatchedRow(dict[str, Any]):
    """A row with the set `read` of the fields that were read by name."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.read = set[str]()

    def __getitem__(self, field: str) -> Any:
        self.read.add(field)
        return super().__getitem__(field)

    def get(self, field: str, default: Any = None) -> Any:
        self.read.add(field)
        return super().get(field, default)

    def __contains__(self, field: object) -> bool:
        self.read.add(str(field))
        return super().__contains__(field)


def required_field(row: Mapping[str, Any], field: str, remedy: str) -> Any:
    """Return the value of a required field. None counts as missing because Parquet fills missing fields with it."""
    value = row.get(field)
    if value is None:
        raise field_error(field, "is missing", remedy)
    return value


CUT_REASONS = ("length", "max_tokens", "max_length")


def is_cut(finish_reason: str | None) -> bool:
    """Return whether a response was cut at the token limit, by the finish reason of OpenAI's, Anthropic's or vLLM's API."""
    return finish_reason is not None and finish_reason.strip().lower() in CUT_REASONS


def as_lists(value: object) -> object:
    """Convert tuples in a value to lists, also nested ones."""
    return [as_lists(entry) for entry in value] if isinstance(value, tuple) else value


def without_none(row: dict[str, Any]) -> dict[str, Any]:
    """Remove the empty fields of a row."""
    return {field: value for field, value in row.items() if value is not None}


def text_or_none(value: object) -> str | None:
    """Return a value if it is nonblank text, else None, so that an odd category does not reject another project's row."""
    return value if isinstance(value, str) and value.strip() else None


def id_or_none(value: object) -> str | None:
    """Return an id given as text or as an integer, or None if it is neither."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text_or_none(value)


def check_spelling(row: Mapping[str, Any], known: Iterable[str]) -> None:
    """Reject a field whose name is similar to a known one, because ignoring it would lose a judgment."""
    names = list(known)
    for field, value in row.items():
        if field in names or value is None:
            continue
        nearest = nearest_name(str(field), names, SPELLING_SIMILARITY)
        if nearest is not None:
            raise field_error(str(field), "is not a known field", f"did you mean '{nearest}'? Rename or remove it")


def check_text(value: object, field: str, *, may_be_empty: bool = False) -> str:
    """Check that text is not blank and can be encoded as UTF-8. It is not stripped: outer spaces are part of the data."""
    if value is None:  # null, or an empty cell of a table
        raise field_error(field, "is empty", "add the text or remove the row")
    if not isinstance(value, str):
        raise field_error(field, f"must be a string, not {short_repr(value)}", "quote it")
    if not may_be_empty and not value.strip():
        raise field_error(field, "is empty", "add the text or remove the row")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "export the text again as UTF-8"
            raise field_error(field, "contains a lone surrogate, which is not a valid character", remedy) from None
    return value


def check_optional_text(value: object, field: str) -> str | None:
    """Return None, or the text that `check_text` accepts."""
    return None if value is None else check_text(value, field)


def check_optional_bool(value: object, field: str) -> bool | None:
    """Return a truth value, or None if it is missing."""
    if value is not None and not isinstance(value, bool):
        raise field_error(field, f"is {short_repr(value)}", "use true or false, or leave it out")
    return value


def check_id(value: object) -> str | None:
    """Return an id as text. Integers are accepted because many data sets number their rows."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_optional_text(value, "id")


def check_list(value: object, field: str, count: int | None = None) -> list[Any]:
    """Check a list, which must have `count` entries (one per response) if a count is given."""
    if not isinstance(value, list | tuple):
        remedy = "write it as JSON, with double quotes" if str(value).startswith("[") else "write it as [..., ...]"
        raise field_error(field, f"must be a list, not {short_repr(value)}", remedy)
    if count is not None and len(value) != count:
        raise field_error(field, f"has {len(value)} entries for {count} responses", "add one per response")
    return list(value)


def check_texts(value: object, field: str, count: int | None = None, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Check a list of strings. They may be empty only if `may_be_empty` is set."""
    entries = enumerate(check_list(value, field, count))
    return tuple(check_text(entry, f"{field}[{i}]", may_be_empty=may_be_empty) for i, entry in entries)


def check_whole_numbers(value: object, field: str, count: int, low: int, high: int | None) -> tuple[int, ...]:
    """Check a list of `count` integers from `low` to `high` (no upper limit if None). 1.0 is accepted, true is not."""
    entries = check_list(value, field, count)
    allowed = f"from {low} to {high}" if high is not None else f"of {low} or more"
    for i, entry in enumerate(entries):
        whole = isinstance(entry, int | float) and not isinstance(entry, bool) and entry % 1 == 0
        if not whole or entry < low or (high is not None and entry > high):
            raise field_error(f"{field}[{i}]", f"is {short_repr(entry)}", f"use a whole number {allowed}")
    return tuple(map(int, entries))


def check_token_ids(value: object, field: str) -> tuple[int, ...]:
    """Check token ids: at least one. Valid ids depend on the tokenizer."""
    ids = check_list(value, field)
    if not ids:
        raise field_error(field, "is empty", "add the ids or remove the row")
    return check_whole_numbers(ids, field, len(ids), 0, None)


def attended_ids(ids: object, mask: object) -> tuple[Any, ...]:
    """Return token ids without padding, as marked by an attention mask. Without a mask (None), return all."""
    token_ids = check_list(ids, "input_ids")
    if mask is None:
        return tuple(token_ids)
    kept = check_list(mask, "attention_mask")
    if len(kept) != len(token_ids) or any(entry not in (0, 1) for entry in kept):
        wrong = f"must contain a 0 or 1 for each of the {len(token_ids)} input_ids"
        raise field_error("attention_mask", wrong, "correct or remove the field")
    return tuple(token for token, is_read in zip(token_ids, kept, strict=True) if is_read)


def check_attributes(value: object) -> dict[str, float]:
    """Check finite numbers by name: at least one. null counts as missing, as Parquet writes it."""
    if not isinstance(value, Mapping):
        raise field_error("attributes", f"must be an object, not {short_repr(value)}", 'use {"name": number, ...}')
    attributes = {str(name): number for name, number in value.items() if number is not None}
    for name, number in attributes.items():
        if not isinstance(number, int | float) or not math.isfinite(float(number)):
            raise field_error(f"attributes.{name}", f"is {short_repr(number)}", "use a finite number")
    if not attributes:
        raise field_error("attributes", "is empty", "add at least one or remove the row")
    return {name: float(number) if isinstance(number, float) else int(number) for name, number in attributes.items()}


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> int | float | None:
    """Return a number, which may be given as text, or None for any other value."""
    try:
        return value if _is_number(value) else float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def check_score(value: object, field: str) -> float:
    """Check a score to rank by: any number except NaN, which cannot be ordered."""
    if not _is_number(value) or math.isnan(value):
        raise field_error(field, f"is {short_repr(value)}", _decimal_point(value) or "give a number")
    return float(value)


def _decimal_point(value: object) -> str:
    """Return the remedy for a number with a decimal comma, or "" for any other value."""
    is_comma = isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value) is not None
    return f"write {str(value).strip().replace(',', '.')}, with a decimal point, in the whole column" if is_comma else ""


def check_margin(value: object) -> float:
    """Check the margin of a pair: a finite number that is not negative."""
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        remedy = _decimal_point(value) or "use a finite number that is 0 or more, or leave it out"
        raise field_error("margin", f"is {short_repr(value)}", remedy)
    return float(value)


def check_preferences(value: object, count: int) -> tuple[tuple[float, ...], ...]:
    """Check the probabilities that response i beats j, for `count` responses. 1 minus (i, j) and (j, i) is for a tie."""
    rows = [check_list(row, f"preferences[{i}]", count) for i, row in enumerate(check_list(value, "preferences", count))]
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            place = f"preferences[{i}][{j}]"
            if not _is_number(entry) or not 0 <= entry <= 1:
                raise field_error(place, f"is {short_repr(entry)}", "use a number from 0 to 1")
            if i == j and entry:
                raise field_error(place, f"is {short_repr(entry)}", "use 0: a response is not better than itself")
            if j < i and entry + rows[j][i] > 1 + ROUNDING:
                wrong = f"and preferences[{j}][{i}] are {entry} and {rows[j][i]}, which sum to more than 1"
                raise field_error(place, wrong, "lower one; the remainder to 1 is the probability of a tie")
    return tuple(tuple(map(float, row)) for row in rows)


def check_flags(value: object, count: int) -> tuple[str, ...] | tuple[tuple[str, ...], ...]:
    """Check flags: names for the ranking (`["unclear"]`), or a list of names for each of the `count` responses."""
    entries = check_list(value, "flags")
    if any(isinstance(entry, list | tuple) for entry in entries):
        per_response = check_list(entries, "flags", count)
        return tuple(check_texts(entry, f"flags[{i}]") for i, entry in enumerate(per_response))
    return check_texts(entries, "flags")


Row = Mapping[str, Any]
TOOLS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REASONING = ("reasoning_content", "thinking")
REFUSED_IN_ROWS = (*TOOLS, *MEDIA, "chat_template_kwargs", "reasoning_content")
REFUSED_IN_TURNS = (*TOOLS, *MEDIA, *REASONING, "train_detail", "training_detail", "loss_scale")
SYSTEM_FIELDS = ("system", "system_prompt")
"""Read as the system turn."""
HISTORY = "history"
"""Read as the turns before the prompt: LLaMA-Factory's pairs of a question and its answer, or turns."""
LEARNING_FLAGS = ("weight", "train", "training", "loss")
"""Flags of assistant turns and of rows to train on. Names of OpenAI, axolotl and ms-swift."""
DESIRABLE = ("label", "kto_tag")
"""Label of a good answer in TRL's and LLaMA-Factory's unpaired preferences."""
SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_avg_rating", "rejected_avg_rating"),
)


def check_turn(turn: Row, field: str) -> None:
    """Reject a turn that contains more than its text."""
    _refuse(turn, REFUSED_IN_TURNS, f"{field}.", "turn")


def check_meaning(row: Row, *, learned: bool, demonstration: bool) -> None:
    """Reject a row whose fields request unsupported processing.

    Args:
        learned: whether the answers are used, too, and not only the prompt.
        demonstration: whether the answer is to be imitated.
    """
    _refuse(row, REFUSED_IN_ROWS if learned else [name for name in REFUSED_IN_ROWS if name not in REASONING], "", "row")
    for name in LEARNING_FLAGS if learned else ():
        if row.get(name) is not None and not is_learned(row, name, name):
            raise field_error(name, f"is {short_repr(row[name])}, so the row must not be trained on", "remove the row")
    for name in DESIRABLE if demonstration else ():
        if row.get(name) is not None and row[name] in (False, "false", "False"):
            wrong = f"is {short_repr(row[name])}, which marks an answer that must not be imitated"
            raise field_error(name, wrong, "remove the row, or the field if it has another meaning")


def _refuse(fields: Row, names: Iterable[str], before: str, what: str) -> None:
    for name in names:
        if is_set(fields.get(name)):
            wrong = f"is not supported and changes the meaning of the {what}"
            raise field_error(f"{before}{name}", wrong, "remove the row, or the field if the text is complete without it")


def is_set(value: object) -> bool:
    """Return whether a field has a value. Parquet fills gaps with null, other writers with empty lists and strings."""
    if value is None or value is False or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")):
        return False
    return not isinstance(value, list | tuple | Mapping) or any(map(is_set, value))


def is_learned(fields: Row, name: str, field: str) -> bool:
    """Return whether a flag of a turn or row (1 or true, 0 or false) marks it for training."""
    value = fields[name]
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise field_error(field, f"is {short_repr(value)}", "use 1 or 0: fractional loss weights are not supported")
    return bool(value)


def learned_turns(turns: Sequence[Any], field: str) -> list[bool]:
    """Return whether each checked turn is trained on: the assistant's turns that no flag excludes."""
    return [
        turn["role"] == "assistant"
        and all(is_learned(turn, name, f"{field}[{i}].{name}") for name in LEARNING_FLAGS if turn.get(name) is not None)
        for i, turn in enumerate(turns)
    ]


def check_scores(row: Row) -> bool:
    """Return whether the scores of a pair are equal. Raise an error if the rejected response has the higher score."""
    for chosen, rejected in SCORES:
        scores = (_number(row.get(chosen)), _number(row.get(rejected)))
        if scores[0] is None or scores[1] is None:
            continue
        if scores[0] < scores[1]:
            wrong = f"is {scores[1]}, higher than {chosen} ({scores[0]})"
            raise field_error(rejected, wrong, "swap the responses or remove the row")
        if scores[0] == scores[1] and chosen == "score_chosen":
            return True
    return False


def turns_before(row: Row, *, has_history: bool) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the system text of a row and the turns before its prompt, from fields beside the prompt.

    Args:
        has_history: whether `history` holds earlier turns. False for a layout whose prompt has this name.
    """
    texts = {name: check_text(row[name], name) for name in SYSTEM_FIELDS if is_set(row.get(name))}
    if len(set(texts.values())) > 1:
        raise field_error(SYSTEM_FIELDS[1], f"differs from '{SYSTEM_FIELDS[0]}'", "keep one of them")
    history = row.get(HISTORY) if has_history else None
    turns = _history_turns(history) if is_set(history) else []
    return next(iter(texts.values()), None), turns


def _history_turns(history: object) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for number, entry in enumerate(check_list(history, HISTORY)):
        if isinstance(entry, Mapping):
            turns.append(dict(entry))
        elif isinstance(entry, list | tuple) and len(entry) == 2:
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), entry, strict=True)]
        else:
            wrong = f"is {short_repr(entry)}"
            raise field_error(f"{HISTORY}[{number}]", wrong, "use [question, answer] or {role, content}")
    return turns
