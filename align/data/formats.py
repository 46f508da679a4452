"""The table of layouts that can be read. The layout of a row is recognized by its fields, given the kind of record."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from align.core.errors import UserError
from align.data import label_tools, layouts
from align.data.conversation import check_conversation
from align.data.fields import WatchedRow, check_meaning, check_row, check_scores, field_error, id_or_none, turns_before
from align.data.layouts import Format, RatedAnswer, Reader, Row, has, has_any, messages_prompt
from align.data.model_comparisons import arena_55k_questions, is_question_turns, question_turn
from align.data.published import PUBLISHED, is_messages_pair
from align.data.records import AttributeJudgment, Demonstration, Prompt, Ranking, Record, RuleJudgment, set_checked

KINDS: dict[str, type[Record]] = {
    "demonstration": Demonstration,
    "ranking": Ranking,
    "rule judgment": RuleJudgment,
    "attribute judgment": AttributeJudgment,
    "prompt": Prompt,
}


def _is_hh(row: Row) -> bool:
    return isinstance(row.get("chosen"), str) and row.get("prompt") is None


def _own(kind: type[Record]) -> Callable[[Row], Sequence[Record]]:
    return lambda row: [kind.from_row(row)]


def _prompt_by(prompt: Reader) -> Callable[[Row], Sequence[Record]]:
    return lambda row: [Prompt(**prompt(row))]


def _prompt_from_ids(row: Row) -> list[Record]:
    """Convert a tokenized prompt, as in TRL's PPO. Text beside it is for reward functions."""
    text = next((f for f in FORMATS if f.kind is Prompt and f.name != "token ids" and f.matches(row)), None)
    if row.get("labels") is not None:
        raise field_error(
            "labels", "marks training targets, so input_ids contains more than a prompt", "keep only the prompts"
        )
    tokenized = Prompt.from_row(row)
    if text is None or tokenized.prompt:
        return [tokenized]
    return [replace(record, ids=tokenized.ids) for record in text.convert(row) if isinstance(record, Prompt)]


def _has_messages(row: Row) -> bool:
    return has("messages")(row) and not is_messages_pair(row)


def _argilla_prompt(row: Row) -> dict[str, Any]:
    return {**label_tools.prompt_of(label_tools.argilla_fields(row)), "id": id_or_none(row.get("id"))}


def _label_studio_prompt(row: Row) -> dict[str, Any]:
    return {**label_tools.prompt_of(label_tools.label_studio_fields(row)), "id": id_or_none(row.get("id"))}


_ATTRIBUTES, _is_judgment = "prompt, response, attributes", has_any("verdict", "rule")
_is_sampled = has("prompt", "responses", "model", without=("ranks",))
# The first match applies. Native layouts match on any of their unique fields, so that missing ones are reported.
_ANSWERED: tuple[Format, ...] = (
    # Demonstrations
    Format("OpenAssistant tree", Demonstration, "prompt {replies}", layouts.is_tree, layouts.tree_demonstrations),
    Format("prompt-completion", Demonstration, "prompt, completion", has("completion"), Demonstration.all_from_row),
    Format("messages", Demonstration, "messages", _has_messages, Demonstration.all_from_row, messages_prompt),
    Format("sampled", Demonstration, "prompt, responses, model", _is_sampled, layouts.sampled_demonstrations),
    # Rankings
    Format("OpenAssistant tree", Ranking, "prompt {replies}", layouts.is_tree, layouts.tree_rankings),
    Format("Argilla", Ranking, "fields, responses", label_tools.is_argilla, label_tools.argilla, _argilla_prompt),
    Format(
        *("Label Studio", Ranking, "data, annotations", label_tools.is_label_studio),
        *(label_tools.label_studio, _label_studio_prompt),
    ),
    Format("ranking", Ranking, "prompt, responses, ranks", has_any("responses", "ranks"), _own(Ranking)),
    *PUBLISHED,
    Format("HH-RLHF", Ranking, "chosen, rejected (transcripts)", _is_hh, layouts.hh_pair, layouts.hh_prompt),
    Format("pair", Ranking, "prompt, chosen, rejected", has_any("chosen", "rejected"), layouts.pair),
    Format("rated answer", Ranking, "prompt, response, rating", has("prompt", "response", "rating"), _own(RatedAnswer)),
    # Judgments
    Format("rule judgment", RuleJudgment, "prompt, response, rule, verdict", _is_judgment, _own(RuleJudgment)),
    Format("attribute judgment", AttributeJudgment, _ATTRIBUTES, has("attributes"), _own(AttributeJudgment)),
)
# Prompts: native rows, and the prompts of all layouts above without their answers
_PROMPTS = (
    Format("token ids", Prompt, "input_ids", has("input_ids"), _prompt_from_ids),
    Format("OpenAssistant tree", Prompt, "prompt {replies}", layouts.is_tree, layouts.tree_prompts),
    Format("pair", Prompt, "chosen (turns)", layouts.is_whole_pair, _prompt_by(layouts.pair_prompt)),
    Format("Arena 55k", Prompt, "prompt, winner_model_a", has_any("winner_model_a"), _prompt_by(arena_55k_questions)),
    Format("prompt", Prompt, "prompt", has("prompt"), _own(Prompt)),
    Format("question", Prompt, "turns", is_question_turns, _prompt_by(question_turn)),
    *(replace(known, kind=Prompt, convert=_prompt_by(known.prompt)) for known in _ANSWERED if known.prompt),
)
FORMATS = (*_ANSWERED, *_PROMPTS)
OWN_LAYOUTS = (
    *("prompt-completion", "messages", "ranking", "pair", "preferred", "rated answer"),
    *("rule judgment", "attribute judgment", "prompt", "token ids"),
)
"""Layouts suggested in error messages."""


FIELDS = {field for known in FORMATS for field in re.findall(r"[\w-]+", known.fields)}
"""All fields that recognize a layout."""


PROMPT_COLUMNS = ("prompt", "messages", "input_ids", "attention_mask", "columns")
"""Columns of a prompt itself."""


def kind_name(kind: type[Record]) -> str:
    """Return the name of a kind of record, such as ranking."""
    return next(name for name, known in KINDS.items() if known is kind)


def find_format(row: Row, kind: type[Record]) -> Format | None:
    """Return the first format of a kind whose fields a row has, or None."""
    return next((known for known in FORMATS if known.kind is kind and known.matches(row)), None)


def convert_row(row: object, kind: type[Record], unused: Counter[str] | None = None) -> tuple[Format, Sequence[Record]]:
    """Return the layout of a row and its records (usually one). For rankings, records may be `RatedAnswer`s, to be grouped
    by prompt.

    Args:
        unused: counts the fields that were given but not used.

    Raises:
        UserError: if a field is invalid or no layout is recognized. Names the field, or the fields of known layouts.
    """
    given = row = check_row(row)
    arrays = {
        field: value.tolist() for field, value in row.items() if hasattr(value, "tolist")
    }  # arrays of formatted `datasets`
    row = layouts.with_parsed_prompt({**row, **arrays})
    layout = find_format(row, kind)
    if layout is None:
        raise _unrecognized(row, kind)
    watched = WatchedRow(row)
    check_meaning(watched, learned=kind is not Prompt, demonstration=kind is Demonstration)
    if kind is Ranking:
        check_scores(watched)
    records = layout.convert(watched)
    before = turns_before(watched, has_history=layout.name != "SHP")
    if any(before):
        records = [_with_turns_before(record, *before) for record in records]
    for record in records:
        if isinstance(record, Prompt):
            set_checked(record, columns=_columns(row))
    if isinstance(given, WatchedRow):
        given.read |= watched.read
    if unused is not None:
        unused.update(str(field) for field, value in row.items() if field not in watched.read and value is not None)
    return layout, records


def _columns(row: Row) -> dict[str, Any]:
    """Return the columns of a prompt row except the prompt, including the columns inside `columns`."""
    inside = row.get("columns")
    further = dict(inside) if isinstance(inside, Mapping) else {}
    return {name: value for name, value in row.items() if name not in PROMPT_COLUMNS} | further


def _with_turns_before(record: Record, system: str | None, history: list[dict[str, Any]]) -> Record:
    if not record.prompt:
        raise field_error("system" if system else "history", "cannot be combined with token ids", "tokenize the full prompt")
    turns: list[Any] = [*record.prompt]
    system_turns = [turns.pop(0)] if turns[0]["role"] == "system" else []
    if system_turns and system is not None and system_turns[0]["content"] != system:
        raise field_error("system", "differs from the system turn of the conversation", "keep one of them")
    if system is not None:
        system_turns = [{"role": "system", "content": system}]
    prompt = check_conversation([*system_turns, *history, *turns], "history" if history else "prompt")
    return replace(record, prompt=prompt)  # type: ignore[type-var]  # every record is a dataclass


def _unrecognized(row: Row, kind: type[Record]) -> UserError:
    present = ", ".join(str(field) for field, value in row.items() if value is not None) or "nothing"
    name = kind_name(kind)
    other = next((known for known in FORMATS if known.kind not in (kind, Prompt) and known.matches(row)), None)
    if other is not None:
        remedy = f"it looks like a {kind_name(other.kind)} ({other.name})"
    else:
        layouts = [known.fields for known in FORMATS if known.kind is kind and known.name in OWN_LAYOUTS]
        remedy = f"use one of: {'; '.join(layouts)} (docs/data.md lists more), or rename columns: FILE[FIELD=COLUMN, ...]"
    return UserError(f"the fields {present} do not match a known layout of a {name}; {remedy}")
