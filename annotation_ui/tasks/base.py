"""What every task answers: which rows make its items, what the browser gets, which answers are valid, what is exported.

An answer comes from the browser in the order that was shown; `canonical` turns it into the order of the item. The
order is kept beside every judgment, so both are always known.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from align.data.records import Prompt, Ranking, Record
from align.errors import UserError
from annotation_ui.markdown import as_messages, messages_html

Json = dict[str, Any]
ROLES = ("system", "user", "assistant")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can say it; UTF-8 cannot
MAX_TEXT = 200_000  # characters in one text of an item or an answer


class BadInputError(ValueError):
    """An answer or an imported row that cannot be taken; the message names the field."""


class Task(ABC):
    """One of the five things a labeler does. Stateless."""

    name: str
    title: str
    needs_rules = False

    @abstractmethod
    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """The items that one imported row makes."""

    def order_size(self, content: Json) -> int:
        """How many things are shown in a random order (0: nothing to shuffle)."""
        return 0

    @abstractmethod
    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        """What the browser shows: rendered, shuffled, without the names of models."""

    @abstractmethod
    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        """The answer with known fields only, or BadInputError."""

    def canonical(self, answer: Json, order: list[int]) -> Json:
        """The answer in the item's own order."""
        return answer

    def shown(self, answer: Json, order: list[int]) -> Json:
        """The inverse of `canonical`: the answer as it looks in a shown order."""
        return answer

    @abstractmethod
    def rows(self, content: Json, answer: Json) -> list[Json]:
        """The rows of docs/data.md that a canonical answer is worth (without labeler and id)."""

    def draft(self, answer: Json) -> Json:
        """The answer as the page takes it up again to change it."""
        return answer

    @abstractmethod
    def summary(self, answer: Json) -> str:
        """The answer in a few words, for the labeler who gave it."""

    def agrees_with_gold(self, answer: Json, gold: Json) -> float | None:
        """Share of the known answer that the canonical answer meets (0 to 1), None if nothing compares."""
        return None


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInputError(message)


def text_field(row: Json, field: str, *, empty: bool = False) -> str:
    """A text of sane length."""
    value = row.get(field, "" if empty else None)
    if not isinstance(value, str):
        raise BadInputError(f"{field}: must be text")
    require(len(value) <= MAX_TEXT, f"{field}: longer than {MAX_TEXT} characters")
    require(empty or bool(value.strip()), f"{field}: is empty")
    require(value.isascii() or not _HALF_CHARACTER.search(value), f"{field}: not valid Unicode")
    return value


def prompt_field(row: Json) -> Any:
    """`prompt` as it is in the row, once the records of training accept it."""
    return recorded(Prompt, {"prompt": row.get("prompt")})["prompt"]


def ranking_fields(row: Json, least: int, most: int) -> Json:
    """`prompt`, `responses` and `model` of a row whose responses are to be compared.

    A response that is there twice is shown once: nobody can prefer it to itself. One name as `model` stands for all.
    """
    require(isinstance(row.get("responses"), list), "responses: must be a list of texts")
    responses, model = row["responses"], row.get("model")
    models = model if isinstance(model, list) else [model] * len(responses)
    require(len(models) == len(responses), f"model: must name {len(responses)} models")
    first = [i for i, response in enumerate(responses) if response not in responses[:i]]
    require("gold" not in row or len(first) == len(responses), "responses: the same one twice in a gold item")
    require(least <= len(first) <= most, f"responses: needs {least} to {most} different ones, has {len(first)}")
    fields = {"prompt": row.get("prompt"), "responses": [responses[i] for i in first]}
    if model is not None:
        fields["model"] = [models[i] for i in first]
    recorded(Ranking, {**fields, "ranks": list(range(1, len(first) + 1))})
    return fields


def recorded(kind: type[Record], row: Json) -> Json:
    """The row, if training could read it as a record of this kind."""
    try:
        kind.from_row(row)
    except UserError as error:
        raise BadInputError(str(error)) from None
    return row


def check_messages(messages: Any, field: str) -> list[dict[str, str]]:
    require(isinstance(messages, list), f"{field}: must be a list of {{role, content}}")
    for number, message in enumerate(messages):
        require(isinstance(message, dict), f"{field}[{number}]: must be {{role, content}}")
        require(message.get("role") in ROLES, f"{field}[{number}].role: must be one of {', '.join(ROLES)}")
        text_field(message, "content", empty=True)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def excerpt(prompt: Any) -> str:
    """The beginning of a prompt, or of a conversation's last turn."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    return text if len(text) <= 120 else f"{text[:117]}..."


def prompt_view(prompt: Any) -> list[dict[str, str]]:
    return messages_html(as_messages(prompt))


def unshuffle(values: list[Any], order: list[int]) -> list[Any]:
    """Values in the order shown, back in the item's order: `order[i]` is the item's index of what was shown i-th."""
    original = [None] * len(values)
    for shown, index in enumerate(order):
        original[index] = values[shown]
    return original
