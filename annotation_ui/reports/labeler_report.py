"""Report on labelers for the lead: number of judgments, speed, accuracy, and the items behind the reliability estimate."""

from collections import Counter, defaultdict
from statistics import fmean, median

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session
from statsmodels.stats.proportion import proportion_confint

from annotation_ui.reports import agreement
from annotation_ui.reports.overview import rounded
from annotation_ui.reports.reliability import Reliability, estimate_reliability
from annotation_ui.reports.task_facts import TaskFacts, task_facts
from annotation_ui.store.current_judgments import CurrentJudgment, current_judgments
from annotation_ui.store.schema import User
from annotation_ui.store.users import stored_name
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.fields import excerpt


def labeler_rows(session: Session, task: str) -> list[Json]:
    """Return one row per labeler, most judgments first."""
    with task_facts(session, task) as facts:
        rows = facts.result("labelers", lambda: _labeler_rows(facts))
    names = dict(session.execute(select(User.pseudonym, User.name)).all())
    return [{"labeler": names[row["exported as"]], **row} for row in rows]


def _labeler_rows(facts: TaskFacts) -> list[Json]:
    seconds: dict[str, list[float]] = defaultdict(list)
    sums: dict[str, list[tuple[float, int]]] = defaultdict(list)
    training: dict[str, list[float]] = defaultdict(list)
    attention: dict[str, list[float]] = defaultdict(list)
    for each in facts.items.values():
        for labeler, active in each.seconds.items():
            seconds[labeler].append(active)
        for labeler, pair in each.agreement.items():
            sums[labeler].append(pair)
        for labeler, is_training, share in each.known_shares:
            (training if is_training else attention)[labeler].append(share)
    estimate, shared = _estimate(facts), _shared_items(facts)
    rows = []
    for labeler in sorted({*seconds, *training, *attention}):
        own, reliability = seconds.get(labeler, []), estimate.labelers.get(labeler)
        interval = None if reliability is None else reliability_interval(reliability, shared[labeler])
        rows.append(
            {
                "exported as": labeler,
                "judgments": len(own),
                "median seconds": round(median(own), 1) if own else None,
                "agreement with others": rounded(agreement.mean_of_sums(sums.get(labeler, ()))),
                "reliability": rounded(reliability),
                "95 % interval": None if interval is None else "{:.2f}–{:.2f}".format(*interval),
                "training": _share(training.get(labeler)),
                "training items": len(training.get(labeler, [])),
                "attention": _share(attention.get(labeler)),
                "attention items": len(attention.get(labeler, [])),
            }
        )
    return sorted(rows, key=lambda row: -row["judgments"])


def items_behind_reliability(session: Session, task: str, labeler: str) -> list[Json]:
    """Return up to 20 shared items behind a labeler's reliability estimate, least trusted answer first."""
    own_name = session.scalar(select(User.pseudonym).where(User.name == stored_name(labeler))) or ""
    with task_facts(session, task) as facts:
        trust = _trust_by_item(facts, own_name)
    chosen = sorted(trust, key=lambda item: (trust[item], item))[:20]
    judgments: dict[int, list[CurrentJudgment]] = defaultdict(list)
    for each in current_judgments(session, (task,), items=chosen):
        if not each.adjudicated:
            judgments[each.item.id].append(each)
    shown = []
    for item in chosen:
        answers = {each.labeler: TASKS[task].summary(each.answer) for each in judgments[item]}
        shown.append(
            {
                "item": item,
                "probability correct": rounded(trust[item]),
                "this labeler": answers.pop(own_name),
                "others": "; ".join(sorted(answers.values())),
                "prompt": excerpt(judgments[item][0].item.content["prompt"]),
            }
        )
    return shown


def reliability_interval(reliability: float, items: int) -> tuple[float, float]:
    """Return the 95 % Clopper-Pearson interval of a labeler's reliability. Each shared item is one trial.

    An item with several questions is still one trial, because its answers depend on each other. The interval is slightly too
    narrow, because the true answers are estimated as well.
    """
    low, high = proportion_confint(reliability * items, items, method="beta")
    return float(np.nan_to_num(low)), float(np.nan_to_num(high, nan=1.0))


def _estimate(facts: TaskFacts) -> Reliability:
    return facts.result("reliability", lambda: estimate_reliability(facts.questions))


def _shared_items(facts: TaskFacts) -> Counter[str]:
    """Map labelers to the number of items with a question that another labeler also answered."""
    shared: Counter[str] = Counter()
    for each in facts.items.values():
        shared.update({labeler for answers in each.questions.values() if len(answers) > 1 for labeler, _ in answers})
    return shared


def _trust_by_item(facts: TaskFacts, labeler: str) -> dict[int, float]:
    """Map each shared item to the mean posterior of this labeler's answers to its questions."""
    posteriors = _estimate(facts).posteriors
    trust = {}
    for item, each in facts.items.items():
        if posteriors and labeler in each.seconds and len(each.seconds) > 1:
            own = [(answers, answer) for answers in each.questions.values() for name, answer in answers if name == labeler]
            if own:
                trust[item] = fmean(posteriors[answers].get(answer, 0.0) for answers, answer in own)
    return trust


def _share(shares: list[float] | None) -> float | None:
    return rounded(fmean(shares)) if shares else None
