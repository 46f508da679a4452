"""Current judgments: neither undone nor replaced by an edit. Exports and the lead's tables use only these."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from annotation_ui.store import guidelines
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, RuleSet, User
from annotation_ui.tasks import TASKS, Json


@dataclass(frozen=True)
class CurrentJudgment:
    """A judgment that is neither undone nor replaced by an edit.

    Attributes:
        item: item that was judged.
        batch: batch of the item.
        judgment: stored judgment.
        labeler: pseudonym of the labeler.
        answer: answer in the imported order of responses.
        adjudicated: whether this is a lead's decision.
        overruled: whether a lead's decision on the item replaces this judgment. If there are several decisions, the last one
            counts.
        rules: rules shown to the labeler.
        guidelines: version number of the guidelines shown to the labeler, from 1, or None if unknown.
    """

    item: Item
    batch: Batch
    judgment: Judgment
    labeler: str
    answer: Json
    adjudicated: bool
    rules: Sequence[Json] = ()
    guidelines: int | None = None
    overruled: bool = False


def current_judgments(
    session: Session,
    tasks: tuple[str, ...],
    batches: Sequence[str] = (),
    *,
    items: Sequence[int] | None = None,
    skips: bool = False,
) -> list[CurrentJudgment]:
    """Return the current judgments in order of item and time. With `skips`, return skips that were not undone instead."""
    newest = select(func.max(Judgment.id)).where(Judgment.assignment_id == Assignment.id).correlate(Assignment)
    skipped = and_(Assignment.state == "skipped", Judgment.id == newest.scalar_subquery())
    query = (
        select(Item, Batch, Judgment, User.pseudonym, Assignment.adjudication)
        .select_from(Assignment)
        .join(Judgment, skipped if skips else Judgment.id == Assignment.current_id)
        .join(Item, Item.id == Assignment.item_id)
        .join(Batch, Batch.id == Assignment.batch_id)
        .join(User, User.id == Assignment.user_id)
        .where(Assignment.task.in_(tasks), Batch.deleted_at.is_(None))
        .order_by(Batch.id, Item.position, Judgment.id)
    )
    if batches:
        query = query.where(Batch.name.in_(batches))
    if items is not None:
        query = query.where(Item.id.in_(items))
    rows = session.execute(query).all()
    stored = {judgment.rule_set_id for _, _, judgment, *_ in rows} - {None}
    rule_sets = session.scalars(select(RuleSet).where(RuleSet.id.in_(stored))) if stored else ()
    rules = {rule_set.id: rule_set.content["rules"] for rule_set in rule_sets}
    numbers = guidelines.numbers(session)
    decisions = {item.id: judgment.id for item, _, judgment, _, adjudicated in rows if adjudicated}  # last one per item
    return [
        CurrentJudgment(
            item,
            batch,
            judgment,
            name,
            _canonical_answer(batch, judgment),
            adjudicated,
            rules.get(judgment.rule_set_id or 0, ()),
            numbers.get(judgment.guideline_id or 0),
            overruled=decisions.get(item.id, judgment.id) != judgment.id,
        )
        for item, batch, judgment, name, adjudicated in rows
    ]


def _canonical_answer(batch: Batch, judgment: Judgment) -> Json:
    answer = judgment.answer or {}
    return answer if judgment.kind == "skip" else TASKS[batch.task].canonical(answer, judgment.shown_order)
