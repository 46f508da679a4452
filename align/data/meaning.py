"""Fields of published data that change what a row means. Each is read or refused; every other unknown field is ignored.

A row that lost its system prompt, its tools or its label would still look like good data, and a model would learn the
wrong thing from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from align.data.fields import check_list, check_text, field_error, short_repr

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
"""Of assistant turns, and of rows: whether they are learned. Names of OpenAI, axolotl and ms-swift."""
DESIRABLE = ("label", "kto_tag")
"""Of TRL's and LLaMA-Factory's unpaired preferences: whether the answer is a good one."""
SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_avg_rating", "rejected_avg_rating"),
)


def check_turn(turn: Row, field: str) -> None:
    """Refuse a turn that holds more than its text.

    Raises:
        UserError: with the field.
    """
    _refuse(turn, REFUSED_IN_TURNS, f"{field}.", "turn")


def check_meaning(row: Row, *, learned: bool, demonstration: bool) -> None:
    """Refuse a row whose fields ask for what cannot be done with it.

    Args:
        learned: its answers are read, too, and not only its prompt.
        demonstration: its answer is learned as one to imitate.

    Raises:
        UserError: with the field.
    """
    _refuse(row, REFUSED_IN_ROWS if learned else [name for name in REFUSED_IN_ROWS if name not in REASONING], "", "row")
    for name in LEARNING_FLAGS if learned else ():
        if row.get(name) is not None and not is_learned(row, name, name):
            raise field_error(name, f"is {short_repr(row[name])}, so the row is not to be learned", "remove the row")
    for name in DESIRABLE if demonstration else ():
        if row.get(name) is not None and row[name] in (False, "false", "False"):
            wrong = f"is {short_repr(row[name])}, which marks an answer not to imitate"
            raise field_error(name, wrong, "remove the row, or the field if it means something else")


def _refuse(fields: Row, names: Iterable[str], before: str, what: str) -> None:
    for name in names:
        if is_set(fields.get(name)):
            wrong = f"changes what the {what} means and cannot be read"
            raise field_error(f"{before}{name}", wrong, "remove the row, or the field if the text is complete without it")


def is_set(value: object) -> bool:
    """Whether a field holds anything: Parquet fills gaps with null, other writers with empty lists and texts."""
    if value is None or value is False or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")):
        return False
    return not isinstance(value, list | tuple | Mapping) or any(map(is_set, value))


def is_learned(fields: Row, name: str, field: str) -> bool:
    """Whether a flag of a turn or row asks to learn it: 1 or true, and not 0 or false.

    Raises:
        UserError: for any other value.
    """
    value = fields[name]
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise field_error(field, f"is {short_repr(value)}", "use 1 or 0: parts of a loss cannot be weighted")
    return bool(value)


def learned_turns(turns: Sequence[Any], field: str) -> list[bool]:
    """Whether each turn is one that is learned: an assistant turn that no flag excludes.

    Args:
        turns: as they are in the file, checked before.
        field: their name, for messages.

    Raises:
        UserError: for a flag that is neither 1 nor 0.
    """
    return [
        turn["role"] == "assistant"
        and all(is_learned(turn, name, f"{field}[{i}].{name}") for name in LEARNING_FLAGS if turn.get(name) is not None)
        for i, turn in enumerate(turns)
    ]


def check_scores(row: Row) -> None:
    """Refuse a pair whose scores contradict it.

    Raises:
        UserError: if the rejected response has the higher score, or `score_chosen` and `score_rejected` are equal.
    """
    for chosen, rejected in SCORES:
        scores = (row.get(chosen), row.get(rejected))
        if not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
            continue
        if scores[0] < scores[1]:  # type: ignore[operator]
            wrong = f"is {scores[1]}, higher than {chosen} ({scores[0]})"
            raise field_error(rejected, wrong, "exchange the responses, or remove the row")
        if scores[0] == scores[1] and chosen == "score_chosen":
            raise field_error(rejected, f"equals {chosen}, so there is nothing to learn", "remove the row")


def turns_before(row: Row, *, has_history: bool) -> tuple[str | None, list[dict[str, Any]]]:
    """The system text of a row, and the turns before its prompt, from fields beside the prompt.

    Args:
        has_history: `history` holds earlier turns; False in a layout that calls its prompt so.

    Raises:
        UserError: for values that are no text or no turns, and for two system texts.
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
            raise field_error(f"{HISTORY}[{number}]", wrong, "write [question, answer], or {role, content}")
    return turns
