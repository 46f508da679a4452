"""Layouts of published demonstrations, and the form of a layout: how it is recognized, its prompt, and its answers.

A converted row has the fields of one of this project's layouts: `messages`, `completion`, `chosen` and `rejected`,
`responses` and `ranks`, or the `response` and `rating` of one answer. The fields of a layout are those of a data set's card.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from align.data.conversation import Message, check_prompt
from align.data.fields import (
    check_list,
    check_text,
    field_error,
    id_or_none,
    required_field,
    short_repr,
    text_or_none,
)
from align.data.layouts import id_and_category
from align.data.records import Demonstration, Record

Row = Mapping[str, Any]
Fields = dict[str, Any]


class PublishedLayout(NamedTuple):
    """One layout.

    Attributes:
        fields: its fields in words.
        matches: whether a row has it.
        prompt: returns the prompt of a row, its id and its category.
        answers: returns the answers of a row with their order.
    """

    name: str
    kind: type[Record]
    fields: str
    matches: Callable[[Row], bool]
    prompt: Callable[[Row], Fields]
    answers: Callable[[Row], Fields]


Adder = Callable[[Callable[[Row], Fields]], Callable[[Row], Fields]]


def layouts_of(kind: type[Record], layouts: list[PublishedLayout]) -> Callable[..., Adder]:
    """Return a decorator that adds a layout of this kind to a list; the decorated function reads the answers."""

    def layout(name: str, fields: str, matches: Callable[[Row], bool], prompt: Callable[[Row], Fields]) -> Adder:
        def add(answers: Callable[[Row], Fields]) -> Callable[[Row], Fields]:
            layouts.append(PublishedLayout(name, kind, fields, matches, prompt, answers))
            return answers

        return add

    return layout


DEMONSTRATIONS: list[PublishedLayout] = []
"""The first match counts."""
demonstration = layouts_of(Demonstration, DEMONSTRATIONS)


def has(*fields: str, without: tuple[str, ...] = ()) -> Callable[[Row], bool]:
    """Whether a row has all `fields` and none of `without`; None counts as missing."""
    return lambda row: all(row.get(f) is not None for f in fields) and all(row.get(f) is None for f in without)


def has_any(*fields: str) -> Callable[[Row], bool]:
    """Whether a row has one of its layout's fields: the error then names the missing one."""
    return lambda row: any(row.get(field) is not None for field in fields)


# --- Prompts ---


def prompt_field(row: Row) -> Fields:
    return {"prompt": required_field(row, "prompt", "write the text to answer"), **id_and_category(row)}


def instruction(extra: str = "", category: str = "category") -> Callable[[Row], Fields]:
    """The instruction, and after an empty line the field `extra` if it is not empty; `category` names a field."""

    def prompt(row: Row) -> Fields:
        text = check_text(required_field(row, "instruction", "write the task"), "instruction")
        addition = check_text(row.get(extra) or "", extra, may_be_empty=True) if extra else ""
        whole = f"{text}\n\n{addition}" if addition.strip() else text
        return {"prompt": whole, "category": text_or_none(row.get(category))}

    return prompt


def question(row: Row) -> Fields:
    text = check_prompt(row.get("question") or row.get("input"), "question")
    return {"prompt": text, "id": id_or_none(row.get("qid")) or id_or_none(row.get("id"))}


# --- Conversations ---

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def read_turn(turn: object, field: str) -> Fields:
    """A turn {from, value}; its other fields, such as `weight`, are kept."""
    if not isinstance(turn, Mapping):
        raise field_error(field, f"is {short_repr(turn)}, not a turn", "write {from, value}")
    speaker = turn.get("from")
    if speaker != "system" and speaker not in SHAREGPT_ROLES:
        raise field_error(f"{field}.from", f"is {short_repr(speaker)}", "use system, human or gpt")
    content = check_text(turn.get("value"), f"{field}.value", may_be_empty=speaker == "system")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**others, "role": SHAREGPT_ROLES.get(speaker, "system"), "content": content}


def read_turns(row: Row) -> list[Fields]:
    turns = check_list(row["conversations"], "conversations")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):  # some copies use the usual names
        return turns
    return [read_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]


def _sharegpt(row: Row) -> Fields:
    return {**id_and_category(row), "messages": read_turns(row)}


def _capybara(row: Row) -> Fields:
    turns: list[Message] = []
    for i, pair in enumerate(check_list(row["conversation"], "conversation")):
        if not isinstance(pair, Mapping):
            raise field_error(f"conversation[{i}]", f"is {short_repr(pair)}", "write {input, output}")
        for name, role in (("input", "user"), ("output", "assistant")):
            turns.append({"role": role, "content": check_text(pair.get(name), f"conversation[{i}].{name}")})
    return {**id_and_category(row), "messages": turns}


IN_PAIR = ("chosen", "rejected")


@demonstration("ShareGPT", "conversations {from, value}", has("conversations", without=IN_PAIR), _sharegpt)
@demonstration("Capybara", "conversation {input, output}", has("conversation", without=IN_PAIR), _capybara)
def _none(row: Row) -> Fields:
    """The answers are among the messages."""
    return {}


# --- Answers to learn ---


@demonstration("OpenOrca", "question, response", has("question", "response"), question)
def _openorca(row: Row) -> Fields:
    return {"completion": check_text(row["response"], "response")}


@demonstration("Alpaca", "instruction, input, output", has("instruction", "output"), instruction("input"))
def _alpaca(row: Row) -> Fields:
    """Its `text`, all fields in a template, is ignored."""
    return {"completion": check_text(row["output"], "output")}


_is_dolly = has("instruction", "response", without=("completions", "chosen_response"))


@demonstration("Dolly", "instruction, context, response", _is_dolly, instruction("context"))
def _dolly(row: Row) -> Fields:
    return {"completion": check_text(row["response"], "response")}
