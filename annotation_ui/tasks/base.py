"""Base class of tasks: everything that depends on the kind of labeling, from an imported row to exported rows.

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
    """A setting of a task's batches: an option of `align annotate import` and a field of the Import tab."""

    name: str
    kind: type[bool] | type[int] | type[str]
    label: str
    help: str


class Value(NamedTuple):
    """A part of an answer on which labelers can agree.

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
    """One kind of labeling. Stateless.

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
        """The contents of the items that one imported row makes.

        Raises:
            BadInputError: if the row does not fit the task.
        """

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        """The known answer of each item of a row, in the item's own order; None for an item without one.

        Raises:
            BadInputError: if a labeler could not give this answer.
        """
        raise BadInputError(f"gold: not supported by task {self.name}")

    def order_size(self, content: Json) -> int:
        """How many responses are shown in a random order (0: nothing to shuffle)."""
        return 0

    def opening(self, content: Json) -> list[dict[str, str]] | None:
        """The beginning of the conversation that the server keeps for each labeler; None if there is no conversation."""
        return None

    @abstractmethod
    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        """The item as the browser shows it: rendered, in the shown order, without the names of models."""

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
        """The inverse of `canonical`: the answer in a shown order. A known answer may lack fields of a full one."""
        return answer

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

    @abstractmethod
    def rows(self, content: Json, answer: Json) -> list[Json]:
        """The rows (docs/data.md) that a canonical answer is exported as, without labeler and id."""

    def records_of(self, record: str, content: Json, answer: Json, rules: Sequence[Json] = ()) -> Iterable[Json]:
        """A canonical answer as records of one kind (a key of `records`); `rules` are those that the labeler saw."""
        return self.records[record](self.rows(content, answer))

    def combine(self, answers: list[Json]) -> Json | None:
        """Several labelers' canonical answers to an item as one; None if they cannot be combined."""
        return None

    def similarity(self, one: Json, two: Json) -> float:
        """The agreement of two canonical answers to an item, from 0 to 1."""
        return float(one == two)

    def values(self, answer: Json) -> Iterable[Value]:
        """The parts of a canonical answer on which agreement is measured."""
        return ()

    def questions(self, answer: Json) -> dict[Any, str]:
        """A canonical answer as questions with one true answer each, from which reliability is estimated."""
        return {}

    def written(self, answer: Json) -> Sequence[str]:
        """The texts in an answer that a model can learn to write, for the lead's view of an item."""
        return ()

    def marks(self, answer: Json) -> set[str]:
        """Features of an answer for the lead's list of judgments, such as flags."""
        return set()


def require(condition: bool, message: str) -> None:
    """Raise BadInputError with the message unless the condition holds."""
    if not condition:
        raise BadInputError(message)
