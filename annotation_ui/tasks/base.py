"""What every task answers: which rows make its items, what the browser gets, which answers are valid, what is exported.

An answer comes from the browser in the order that was shown; `canonical` turns it into the order of the item. The
order is kept beside every judgment, so both are always known.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

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
        """The rows of DESIGN section 6 that a canonical answer is worth (without labeler and id)."""

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
    """`prompt` as DESIGN section 6 has it: text, or a list of {role, content}."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return text_field(row, "prompt")
    require(isinstance(prompt, list) and bool(prompt), "prompt: must be text or a list of {role, content}")
    return check_messages(prompt, "prompt")


def check_messages(messages: Any, field: str) -> list[dict[str, str]]:
    require(isinstance(messages, list), f"{field}: must be a list of {{role, content}}")
    for number, message in enumerate(messages):
        require(isinstance(message, dict), f"{field}[{number}]: must be {{role, content}}")
        require(message.get("role") in ROLES, f"{field}[{number}].role: must be one of {', '.join(ROLES)}")
        text_field(message, "content", empty=True)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def responses_field(row: Json, least: int, most: int) -> list[str]:
    responses = row.get("responses")
    require(isinstance(responses, list), "responses: must be a list of texts")
    assert isinstance(responses, list)
    require(least <= len(responses) <= most, f"responses: needs {least} to {most}, has {len(responses)}")
    return [text_field({f"responses[{i}]": text}, f"responses[{i}]", empty=True) for i, text in enumerate(responses)]


def model_field(row: Json, size: int) -> list[str | None] | None:
    """`model`: one name for each response; a single name stands for all."""
    model = row.get("model")
    if model is None:
        return None
    names = [model] * size if isinstance(model, str) else model
    require(isinstance(names, list) and len(names) == size, f"model: must name {size} models")
    require(all(name is None or isinstance(name, str) for name in names), "model: must be text")
    return names


def prompt_view(prompt: Any) -> list[dict[str, str]]:
    return messages_html(as_messages(prompt))


def unshuffle(values: list[Any], order: list[int]) -> list[Any]:
    """Values in the order shown, back in the item's order: `order[i]` is the item's index of what was shown i-th."""
    original = [None] * len(values)
    for shown, index in enumerate(order):
        original[index] = values[shown]
    return original
