"""Base class of tasks, from imported rows to exported records.

An answer comes from the browser in the order that was shown; `canonical` turns it into the order of the item. The
shown order is stored with every judgment, so both are always known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

Json = dict[str, Any]


class BadInputError(ValueError):
    """Raised for an invalid answer or imported row. The message names the field."""


class Setting(NamedTuple):
    """A batch setting of a task: an option of `align annotate import` and a field of the Import tab."""

    name: str
    kind: type[bool] | type[int] | type[str]
    label: str
    help: str


class Value(NamedTuple):
    """A part of an answer whose agreement is measured.

    Attributes:
        scale: the measured quantity, such as a rule; empty if an answer is a single value.
        level: whether values have an order.
        unit: the subject of the value, within the item.
        value: None if the labeler gave none.
    """

    scale: str
    level: Literal["nominal", "ordinal"]
    unit: Hashable
    value: Any


class Task(ABC):
    """A labeling task. Stateless.

    Attributes:
        name: the key of `TASKS`; static/tasks/NAME.js is its part of the labelers' page.
        title: its name on the page.
        needs_rules: whether a batch needs a rule set.
        comparable: whether several labelers' answers to an item can be compared.
        settings: of its batches.
        records: kind of exported record -> how the rows of one answer become records of that kind.
        answer_filters: features of answers that the lead can filter by, such as a flag -> its name in the list.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs_rules: ClassVar[bool] = False
    comparable: ClassVar[bool] = False
    settings: ClassVar[tuple[Setting, ...]] = ()
    records: ClassVar[Mapping[str, Callable[[Sequence[Json]], Iterable[Json]]]] = {}
    answer_filters: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """Return the contents of the items of an imported row.

        Raises:
            BadInputError: if the row does not fit the task.
        """

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        """Return the known answer of each item of a row, in the imported order, or None.

        Raises:
            BadInputError: if a labeler could not give this answer.
        """
        raise BadInputError(f"gold: not supported by task {self.name}")

    def order_size(self, content: Json) -> int:
        """Return the number of responses to shuffle, or 0."""
        return 0

    def opening(self, content: Json) -> list[dict[str, str]] | None:
        """Return the beginning of the conversation that the server stores for each labeler, or None."""
        return None

    @abstractmethod
    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        """Return the item for the browser: rendered, in the shown order, without model names."""

    @abstractmethod
    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        """Return the answer with known fields only.

        Raises:
            BadInputError: if it is incomplete or not valid.
        """

    def canonical(self, answer: Json, order: list[int]) -> Json:
        """Return the answer in the imported order of responses."""
        return answer

    def shown(self, answer: Json, order: list[int]) -> Json:
        """Return the answer in a shown order: the inverse of `canonical`. A known answer may lack fields."""
        return answer

    def draft(self, answer: Json) -> Json:
        """Return the state in which the page opens the answer for editing."""
        return answer

    @abstractmethod
    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        """Summarize the answer. With `rules`, use the labels of the form that the labeler saw."""

    def known(self, gold: Json, rules: Sequence[Json] = ()) -> str:
        """Summarize a known answer (`gold`), which may lack parts of a full answer."""
        return self.summary(gold, rules)

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        """Return the share of the known answer that the canonical answer matches, or None if nothing can be compared."""
        return None

    @abstractmethod
    def rows(self, content: Json, answer: Json) -> list[Json]:
        """Return the rows (docs/data.md) of a canonical answer, without labeler and id."""

    def records_of(self, record: str, content: Json, answer: Json, rules: Sequence[Json] = ()) -> Iterable[Json]:
        """Return a canonical answer as records of a kind (a key of `records`). `rules` are those that the labeler saw."""
        return self.records[record](self.rows(content, answer))

    def combine(self, answers: list[Json]) -> Json | None:
        """Combine labelers' canonical answers to an item. Return None if they cannot be combined."""
        return None

    def similarity(self, one: Json, two: Json) -> float:
        """Return the agreement of two canonical answers to an item, from 0 to 1."""
        return float(one == two)

    def values(self, answer: Json) -> Iterable[Value]:
        """Return the parts of a canonical answer whose agreement is measured."""
        return ()

    def questions(self, answer: Json) -> dict[Any, str]:
        """Return a canonical answer as questions with one true answer each, to estimate reliability."""
        return {}

    def written(self, answer: Json) -> Sequence[str]:
        """Return the texts in an answer that a model can learn to write."""
        return ()

    def marks(self, answer: Json) -> set[str]:
        """Return features of an answer for the lead's list of judgments, such as flags."""
        return set()


def require(condition: bool, message: str) -> None:
    """Raise BadInputError unless the condition holds."""
    if not condition:
        raise BadInputError(message)
