"""Base class of tasks: items made from a row, the browser's view, validation of answers, and export.

An answer comes from the browser in the order that was shown; `canonical` turns it into the order of the item. The
shown order is stored with every judgment, so both are always known.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from align.core.errors import UserError
from align.data.conversation import ROLES
from align.data.records import Prompt, Ranking, Record
from annotation_ui.markdown import as_messages, messages_html

Json = dict[str, Any]
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold one alone; UTF-8 cannot
MAX_TEXT = 200_000  # characters in one text of an item or an answer
MAX_COMMENT = 2000


class BadInputError(ValueError):
    """An answer or an imported row that is not valid; the message names the field."""


class Task(ABC):
    """One of the five kinds of labeling. Stateless."""

    name: str
    title: str
    needs_rules = False

    @abstractmethod
    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """The contents of the items that one imported row makes.

        Raises:
            BadInputError: if the row does not fit the task.
        """

    def order_size(self, content: Json) -> int:
        """How many responses are shown in a random order (0: nothing to shuffle)."""
        return 0

    @abstractmethod
    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        """What the browser shows: rendered, in the shown order, without the names of models."""

    @abstractmethod
    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        """The answer with known fields only.

        Raises:
            BadInputError: if it is incomplete or not valid.
        """

    def canonical(self, answer: Json, order: list[int]) -> Json:
        """The answer in the item's own order."""
        return answer

    def shown(self, answer: Json, order: list[int]) -> Json:
        """The inverse of `canonical`: the answer in a shown order."""
        return answer

    @abstractmethod
    def rows(self, content: Json, answer: Json) -> list[Json]:
        """The rows (docs/data.md) that a canonical answer is exported as, without labeler and id."""

    def draft(self, answer: Json) -> Json:
        """The answer as the state in which the page opens it for a change."""
        return answer

    @abstractmethod
    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        """The answer in a few words; with `rules`, in those of the form that the labeler saw."""

    def known(self, gold: Json, rules: Sequence[Json] = ()) -> str:
        """A known answer (`gold`) in a few words; it may lack parts of a full answer."""
        return self.summary(gold, rules)

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        """Share of the known answer that the canonical answer matches (0 to 1); None if there is nothing to compare."""
        return None


def require(condition: bool, message: str) -> None:
    """Raise BadInputError with the message unless the condition holds."""
    if not condition:
        raise BadInputError(message)


def text_field(row: Json, field: str, *, empty: bool = False) -> str:
    """A text field of a row, checked for its type, length and Unicode.

    Raises:
        BadInputError: if it is not valid, or blank where `empty` is not set.
    """
    value = row.get(field, "" if empty else None)
    if not isinstance(value, str):
        raise BadInputError(f"{field}: must be text")
    require(len(value) <= MAX_TEXT, f"{field}: longer than {MAX_TEXT} characters")
    require(empty or bool(value.strip()), f"{field}: is empty")
    require(is_unicode(value), f"{field}: not valid Unicode")
    return value


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    return text.isascii() or not _SURROGATE.search(text)


def comment_field(answer: Json) -> Json:
    """The labeler's `comment` on an answer; nothing if there is none.

    Raises:
        BadInputError: if it is not text, or longer than `MAX_COMMENT`.
    """
    comment = text_field(answer, "comment", empty=True).strip()
    require(len(comment) <= MAX_COMMENT, f"comment: longer than {MAX_COMMENT} characters")
    return {"comment": comment} if comment else {}


def prompt_field(row: Json) -> Any:
    """`prompt` as it is in the row, after a check that training can read it."""
    return checked_record(Prompt, {"prompt": row.get("prompt")})["prompt"]


def ranking_fields(row: Json, fewest: int, most: int) -> Json:
    """`prompt`, `responses` and `model` of a row whose responses are to be compared.

    A response that occurs twice is shown once, because nobody can prefer it to itself; all empty ones count as the same.
    A single name as `model` is that of all.

    Raises:
        BadInputError: if a field is not valid, or there are fewer than `fewest` or more than `most` different responses.
    """
    require(isinstance(row.get("responses"), list), "responses: must be a list of texts")
    responses = row["responses"]
    models = model_names(row, len(responses))
    comparable = [response if not isinstance(response, str) or response.strip() else "" for response in responses]
    first = [i for i, response in enumerate(comparable) if response not in comparable[:i]]
    require("gold" not in row or len(first) == len(responses), "responses: the same one twice in a gold item")
    require(fewest <= len(first) <= most, f"responses: needs {fewest} to {most} different ones, has {len(first)}")
    fields = {"prompt": row.get("prompt"), "responses": [responses[i] for i in first]}
    if row.get("model") is not None:
        fields["model"] = [models[i] for i in first]
    checked_record(Ranking, {**fields, "ranks": list(range(1, len(first) + 1))})
    for number, response in enumerate(responses):
        require(len(response) <= MAX_TEXT, f"responses[{number}]: longer than {MAX_TEXT} characters")
    return fields


def model_names(row: Json, count: int) -> list[Any]:
    """Who wrote each of `count` responses, from the row's `model`: one name for each or for all; None if there is no name.

    Raises:
        BadInputError: if there are fewer or more names.
    """
    model = row.get("model")
    models = model if isinstance(model, list) else [model] * count
    require(len(models) == count, f"model: must name {count} models")
    return models


def checked_record(kind: type[Record], row: Json) -> Json:
    """The row, if training can read it as a record of this kind.

    Raises:
        BadInputError: if it cannot.
    """
    try:
        kind.from_row(row)
    except UserError as error:
        raise BadInputError(str(error)) from None
    return row


def check_messages(messages: Any, field: str) -> list[dict[str, str]]:
    """A conversation with known fields only; errors name `field`."""
    require(isinstance(messages, list), f"{field}: must be a list of {{role, content}}")
    for number, message in enumerate(messages):
        require(isinstance(message, dict), f"{field}[{number}]: must be {{role, content}}")
        require(message.get("role") in ROLES, f"{field}[{number}].role: must be one of {', '.join(ROLES)}")
        text_field(message, "content", empty=True)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def excerpt(prompt: Any) -> str:
    """The beginning of a prompt, or of the last turn of a conversation."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    return text if len(text) <= 120 else f"{text[:117]}..."


def prompt_view(prompt: Any) -> list[dict[str, str]]:
    """A prompt as messages with rendered content."""
    return messages_html(as_messages(prompt))


def unshuffle(values: list[Any], order: list[int]) -> list[Any]:
    """Bring values from the shown order back to the item's: `order[i]` is the item's index of what was shown i-th."""
    original = [None] * len(values)
    for position, index in enumerate(order):
        original[index] = values[position]
    return original
