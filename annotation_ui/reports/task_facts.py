"""In-memory facts about the current answers, from which the lead's tables are computed.

Judgments are append-only, so the answers to an item change only when a judgment is added. Before a table is computed,
`task_facts` rereads the items with new judgments and keeps the facts of all others.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from sqlalchemy import func, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from annotation_ui.reports.agreement import Level, agreement_sums, pattern, units_of
from annotation_ui.reports.reliability import Pattern, patterns_by_unit
from annotation_ui.store.database import Database
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, User
from annotation_ui.tasks import TASKS, Json, Task

_CHUNK = 500  # items per query
_LOOKBACK = 1000  # ids; PostgreSQL assigns ids before commit, so a lower id can become visible after a higher one
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """Facts about one item. A lead's decision affects only `is_decided` and, in Compare, `models`.

    For a training item, `seconds`, `agreement`, `units`, `questions` and `models` are empty. For any item with a known
    answer, `units` and `models` are empty.

    Attributes:
        item: item id.
        is_known: whether the item has a known answer.
        is_decided: whether a lead has decided the item.
        seconds: labeler -> active seconds.
        agreement: labeler -> (sum of similarities to the other labelers' answers, number of those answers).
        units: (scale, level, sorted values) of each unit.
        questions: question -> (labeler, answer) pairs.
        known_shares: (labeler, whether this is a training item, matched fraction of the known answer).
        models: (model, outcome) in Compare, (model, rating) in Rank.
    """

    item: int
    is_known: bool
    is_decided: bool
    seconds: dict[str, float]
    agreement: dict[str, tuple[float, int]]
    units: tuple[tuple[str, Level, tuple[Any, ...]], ...]
    questions: dict[Hashable, Pattern]
    known_shares: tuple[tuple[str, bool, float], ...]
    models: tuple[tuple[str | None, Any], ...]


@dataclass
class TaskFacts:
    """Facts about all items of a task.

    Attributes:
        task: key of `TASKS`.
        items: item id -> facts. After a full read, items are in import order.
        units: (scale, level) -> sorted values -> number of units.
        questions: (labeler, answer) pairs -> number of questions.
    """

    task: str
    items: dict[int, ItemFacts] = field(default_factory=dict)
    units: dict[tuple[str, Level], Counter[tuple[Any, ...]]] = field(default_factory=dict)
    questions: Counter[Pattern] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.RLock)
    _deleted: frozenset[int] = frozenset()
    _judgments: int = 0
    _newest: int = 0
    _recent: frozenset[int] = frozenset()
    _interned: dict[Any, Any] = field(default_factory=dict)
    _results: dict[str, Any] = field(default_factory=dict)

    def result(self, name: str, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, cached under `name` until a new judgment changes the facts."""
        if name not in self._results:
            self._results[name] = compute()
        return cast(Result, self._results[name])

    def update(self, session: Session) -> None:
        """Reread the items with new judgments. After any other change, reread all items."""
        deleted = frozenset(session.scalars(select(Batch.id).where(Batch.task == self.task, Batch.deleted_at.is_not(None))))
        total = select(func.count()).select_from(Judgment).scalar_subquery()  # in the same snapshot
        query = (
            select(Judgment.id, Judgment.item_id, Assignment.task, total)
            .join(Assignment, Assignment.id == Judgment.assignment_id)
            .where(Judgment.id > self._newest - _LOOKBACK)
        )
        rows = session.execute(query).all() if self._judgments else []
        judgments = rows[0][3] if rows else 0
        if rows and judgments < self._judgments:
            return  # this session's snapshot is older than the facts
        new = [row for row in rows if row[0] not in self._recent]
        if not rows or judgments != self._judgments + len(new) or deleted != self._deleted:
            self._deleted = deleted
            self._read_all(session)
            return
        items = sorted({item for _, item, task, _ in new if task == self.task})
        if items:
            self._results.clear()
        for start in range(0, len(items), _CHUNK):
            self._read_items(session, items[start : start + _CHUNK])
        self._judgments = judgments
        self._newest = max(number for number, *_ in rows)
        self._recent = frozenset(number for number, *_ in rows)

    def _read_all(self, session: Session) -> None:
        self.items.clear()
        self.units.clear()
        self.questions.clear()
        self._interned.clear()
        self._results.clear()
        ids, total = select(Judgment.id), select(func.count()).select_from(Judgment)
        self._judgments = session.scalar(total) or 0
        self._newest = session.scalar(select(func.max(Judgment.id))) or 0
        self._recent = frozenset(session.scalars(ids.where(Judgment.id > self._newest - _LOOKBACK)))
        self._read_items(session)

    def _read_items(self, session: Session, items: list[int] | None = None) -> None:
        """Replace the facts of the given items. If None, read all items."""
        query = (
            select(
                *(Item.id, Item.gold, Item.purpose, Item.content["model"], Item.content["also_by"]),
                *(Judgment.answer, Judgment.shown_order, Judgment.seconds, User.pseudonym, Assignment.adjudication),
            )
            .select_from(Assignment)
            .join(Judgment, Judgment.id == Assignment.current_id)
            .join(Item, Item.id == Assignment.item_id)
            .join(Batch, Batch.id == Assignment.batch_id)
            .join(User, User.id == Assignment.user_id)
            .where(Assignment.task == self.task, Batch.deleted_at.is_(None))
            .order_by(Item.batch_id, Item.position, Judgment.id)
        )
        if items is not None:
            query = query.where(Item.id.in_(items))
            for item in items:
                self._forget(item)
        task = TASKS[self.task]
        rows = session.execute(query.execution_options(yield_per=1000))
        for item, group in groupby(rows, key=lambda row: row[0]):
            self._add(_facts_of_item(task, item, list(group)))

    def _forget(self, item: int) -> None:
        facts = self.items.pop(item, None)
        if facts is not None:
            self._count(facts, -1)

    def _add(self, facts: ItemFacts) -> None:
        for question, answers in facts.questions.items():  # equal patterns share one object
            facts.questions[question] = self._interned.setdefault(answers, answers)
        self.items[facts.item] = facts
        self._count(facts, 1)

    def _count(self, facts: ItemFacts, by: int) -> None:
        for scale, level, values in facts.units:
            self.units.setdefault((scale, level), Counter())[values] += by
        for answers in facts.questions.values():
            self.questions[answers] += by


_FACTS: WeakKeyDictionary[Any, dict[str, TaskFacts]] = WeakKeyDictionary()  # by database, then by task


def read_facts(database: Database) -> None:
    """Read the facts of all tasks. With tens of thousands of judgments, this takes seconds."""
    for task in TASKS:
        with database.read() as session, task_facts(session, task):
            pass


@contextmanager
def task_facts(session: Session, task: str) -> Iterator[TaskFacts]:
    """Yield the facts of a task, including all judgments visible to the session. The block holds the task's lock."""
    engine = session.get_bind()
    assert isinstance(engine, Engine)
    facts = _FACTS.setdefault(engine, {}).setdefault(task, TaskFacts(task))
    with facts._lock:
        facts.update(session)
        yield facts


def _facts_of_item(task: Task, item: int, rows: list[tuple[Any, ...]]) -> ItemFacts:
    _, gold, purpose, model, also_by, *_ = rows[0]
    answers: dict[str, Json] = {}
    seconds: dict[str, float] = {}
    decision: Json | None = None
    for *_, answer, order, active, labeler, adjudicated in rows:
        canonical = task.canonical(answer or {}, order)
        if adjudicated:
            decision = canonical  # if several leads decided, the last decision counts
        else:
            answers[labeler], seconds[labeler] = canonical, active
    is_training = purpose == "training"
    shares = ((labeler, task.gold_agreement(answer, gold)) for labeler, answer in answers.items()) if gold else ()
    compared = {} if is_training else answers
    questions = ((name, task.questions(answer)) for name, answer in compared.items())
    asked = ((question, name, value) for name, own in questions for question, value in own.items())
    units = [] if gold else [(unit.scale, unit.level, pattern(unit)) for unit in units_of(task, compared)]
    return ItemFacts(
        item,
        bool(gold),
        decision is not None,
        {} if is_training else seconds,
        agreement_sums(compared, task.similarity) if task.comparable else {},
        tuple(units),
        patterns_by_unit(asked),
        tuple((labeler, is_training, share) for labeler, share in shares if share is not None),
        () if gold else tuple(_of_models(task.name, model, also_by, compared, decision)),
    )


def _of_models(
    task: str, model: Any, also_by: Any, answers: dict[str, Json], decision: Json | None
) -> Iterable[tuple[str | None, Any]]:
    """Yield (model, outcome or rating). A response written by several models counts once for each of them."""
    for answer in [decision] if decision and task == "compare" else answers.values():
        if task == "compare":
            choice, models = answer["choice"], model or ["first", "second"]
            values = ["ties" if choice not in ("A", "B") else "wins" if choice == side else "losses" for side in "AB"]
        elif task == "rank":
            values = answer["ratings"]
            models = model or [None] * len(values)
        else:
            return
        for value, name, others in zip(values, models, also_by or [[]] * len(values), strict=True):
            if value is not None:
                yield from ((each, value) for each in (name, *others))
