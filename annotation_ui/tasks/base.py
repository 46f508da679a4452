"""Base class of tasks, from imported rows to exported records.

The browser sends an answer in the shown order of responses, and `canonical` converts it to the imported order. The shown
order is stored with every judgment, so an answer can be converted either way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

Json = dict[str, Any]


class BadInputError(ValueError):
    """Raised for an invalid answer or imported row. The message names the field."""


class Setting(NamedTuple):
    """A batch setting of a task, available as an option of `align annotate import` and as a field of the Import tab."""

    name: str
    kind: type[bool] | type[int] | type[str]
    label: str
    help: str


class Value(NamedTuple):
    """A part of an answer whose agreement is measured.

    Attributes:
        scale: measured quantity, such as a rule. Empty if an answer is a single value.
        level: level of measurement. Ordinal values have an order.
        unit: subject of the value within the item, such as a response.
        value: value given by the labeler, or None.
    """

    scale: str
    level: Literal["nominal", "ordinal"]
    unit: Hashable
    value: Any


class Task(ABC):
    """A labeling task. Stateless.

    Attributes:
        name: key of `TASKS`. static/tasks/NAME.js implements the task on the labelers' page.
        title: name shown on the page.
        needs_rules: whether a batch needs a rule set.
        comparable: whether several labelers' answers to an item can be compared.
        settings: settings of the task's batches.
        records: kind of exported record -> function that converts the rows of one answer to records of that kind.
        answer_filters: feature of an answer, such as a flag -> label of the filter in the lead's list.
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
            BadInputError: If the row does not fit the task.
        """

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        """Return the known answer of each item of a row, in the imported order, or None.

        Raises:
            BadInputError: If a labeler could not give this answer.
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
        """Return the item as JSON for the browser, rendered in the shown order and without model names."""

    @abstractmethod
    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        """Return the answer with known fields only.

        Raises:
            BadInputError: If the answer is incomplete or invalid.
        """

    def canonical(self, answer: Json, order: list[int]) -> Json:
        """Return the answer in the imported order of responses."""
        return answer

    def shown(self, answer: Json, order: list[int]) -> Json:
        """Return the answer in a shown order (the inverse of `canonical`). A known answer may lack fields."""
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
        """Return the fraction of the known answer matched by the canonical answer, or None if nothing can be compared."""
        return None

    @abstractmethod
    def rows(self, content: Json, answer: Json) -> list[Json]:
        """Return the rows (docs/data.md) of a canonical answer, without labeler and id."""

    def records_of(self, record: str, content: Json, answer: Json, rules: Sequence[Json] = ()) -> Iterable[Json]:
        """Return a canonical answer as records of a kind.

        Args:
            record: key of `records`.
            content: content of the item.
            answer: canonical answer.
            rules: rules shown to the labeler.
        """
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
        """Map questions to the labeler's answers. Each question has one true answer, from which reliability is estimated."""
        return {}

    def written(self, answer: Json) -> Sequence[str]:
        """Return the parts of an answer that the labeler wrote and a model can be trained on."""
        return ()

    def marks(self, answer: Json) -> set[str]:
        """Return features of an answer, such as flags, for the lead's list of judgments."""
        return set()


def require(condition: bool, message: str) -> None:
    """Raise BadInputError unless the condition holds."""
    if not condition:
        raise BadInputError(message)
