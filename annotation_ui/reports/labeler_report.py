"""The lead's report on each labeler: amount, speed, accuracy, and the items behind the estimate."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean, median
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session
from statsmodels.stats.proportion import proportion_confint

from annotation_ui.reports import agreement
from annotation_ui.reports.overview import answers_by_item, labelers_judgments, rounded
from annotation_ui.reports.reliability import Reliability, Row, estimate_reliability
from annotation_ui.store.current_judgments import CurrentJudgment, current_judgments
from annotation_ui.store.schema import User
from annotation_ui.store.users import stored_name
from annotation_ui.tasks import TASKS, Json, Task
from annotation_ui.tasks.fields import excerpt


def reliability_rows(task: Task, by_item: dict[Any, dict[str, Json]]) -> Iterable[Row]:
    """Answers (item -> labeler -> answer) as the rows that `estimate_reliability` takes; a unit is (item, question)."""
    for item, by_labeler in by_item.items():
        for labeler, answer in by_labeler.items():
            yield from (((item, question), labeler, value) for question, value in task.questions(answer).items())


def labeler_rows(session: Session, task: str) -> list[Json]:
    """One row per labeler, most judgments first."""
    kind = TASKS[task]
    all_judgments = [each for each in current_judgments(session, (task,)) if not each.adjudicated]
    judgments = [each for each in all_judgments if each.item.purpose != "training"]
    by_item = answers_by_item(judgments)
    agreement_by_labeler = agreement.agreement_with_others(by_item, kind.similarity) if kind.comparable else {}
    answered = tuple(reliability_rows(kind, by_item))
    estimate = _estimate(answered)
    intervals = {labeler: reliability_interval(estimate, answered, labeler) for labeler in estimate.labelers}
    training, attention = _known_answers(kind, all_judgments)
    names = dict(session.execute(select(User.pseudonym, User.name)).all())
    by_labeler: dict[str, list[CurrentJudgment]] = defaultdict(list)
    for judgment in judgments:
        by_labeler[judgment.labeler].append(judgment)
    rows = [
        {
            "labeler": names[labeler],
            "exported as": labeler,
            "judgments": len(own := by_labeler.get(labeler, [])),
            "median seconds": round(median(each.judgment.seconds for each in own), 1) if own else None,
            "agreement with others": rounded(agreement_by_labeler.get(labeler)),
            "reliability": rounded(estimate.labelers.get(labeler)),
            "95 % interval": "{:.2f}–{:.2f}".format(*intervals[labeler]) if labeler in intervals else None,
            "training": _share(training.get(labeler)),
            "training items": len(training.get(labeler, [])),
            "attention": _share(attention.get(labeler)),
            "attention items": len(attention.get(labeler, [])),
        }
        for labeler in sorted({*by_labeler, *training, *attention})
    ]
    return sorted(rows, key=lambda row: -row["judgments"])


def items_behind_reliability(session: Session, task: str, labeler: str) -> list[Json]:
    """At most 20 items behind a labeler's reliability that another labeler judged too, least trusted answer first."""
    own_name = session.scalar(select(User.pseudonym).where(User.name == stored_name(labeler))) or ""
    judgments = labelers_judgments(session, task)
    by_item = answers_by_item(judgments)
    rows = tuple(reliability_rows(TASKS[task], by_item))
    trusted = _trust_by_item(_estimate(rows), rows, own_name)
    items = {each.item.id: each.item for each in judgments}
    shown = []
    for item_id in sorted((item for item in trusted if len(by_item[item]) > 1), key=lambda item: (trusted[item], item)):
        answers = {name: TASKS[task].summary(answer) for name, answer in by_item[item_id].items()}
        own = answers.pop(own_name)
        shown.append(
            {
                "item": item_id,
                "chance of being right": rounded(trusted[item_id]),
                "this labeler": own,
                "others": "; ".join(sorted(answers.values())),
                "prompt": excerpt(items[item_id].content["prompt"]),
            }
        )
    return shown[:20]


def reliability_interval(estimate: Reliability, rows: Sequence[Row], labeler: str) -> tuple[float, float]:
    """The 95 % interval of a labeler's reliability, by Clopper and Pearson, with each shared item as one trial.

    An item with many questions counts once, because its answers depend on each other. That the true answers are estimated,
    too, makes the interval a little too narrow. `rows` are the input of the estimate; a unit is (item, question).
    """
    answers = Counter(unit for unit, _, _ in rows)
    items = len({unit[0] for unit, name, _ in rows if name == labeler and answers[unit] > 1})  # type: ignore[index]
    low, high = proportion_confint(estimate.labelers[labeler] * items, items, method="beta")
    return float(np.nan_to_num(low)), float(np.nan_to_num(high, nan=1.0))


@lru_cache(maxsize=8)
def _estimate(rows: tuple[Row, ...]) -> Reliability:
    """The estimate from these rows, cached: a click on a labeler needs the one behind the table on the page."""
    return estimate_reliability(rows)


def _trust_by_item(estimate: Reliability, rows: tuple[Row, ...], labeler: str) -> dict[Any, float]:
    """Item -> the mean posterior of this labeler's answers to it."""
    trust: dict[Any, list[float]] = defaultdict(list)
    for unit, name, answer in rows:
        if name == labeler and unit in estimate.posteriors:
            trust[unit[0]].append(estimate.posteriors[unit].get(answer, 0.0))  # type: ignore[index]
    return {item: fmean(values) for item, values in trust.items()}


def _known_answers(task: Task, judgments: list[CurrentJudgment]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Labeler -> agreement with each known answer, of training items and of attention items."""
    training: dict[str, list[float]] = defaultdict(list)
    attention: dict[str, list[float]] = defaultdict(list)
    for each in judgments:
        if each.item.gold:
            share = task.gold_agreement(each.answer, each.item.gold)
            if share is not None:
                (training if each.item.purpose == "training" else attention)[each.labeler].append(share)
    return training, attention


def _share(shares: list[float] | None) -> float | None:
    return rounded(fmean(shares)) if shares else None
