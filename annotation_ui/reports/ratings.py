"""Ratings of each model's responses from 1 to 7 (InstructGPT's scale): distribution, mean and interval."""

import math
from collections import Counter, defaultdict

from sqlalchemy.orm import Session

from align.data.records import RATINGS
from annotation_ui.reports.overview import rounded
from annotation_ui.reports.task_facts import TaskFacts, task_facts
from annotation_ui.tasks import Json

Z95 = 1.959964  # 97.5 % quantile of the normal distribution


def ratings_by_model(session: Session) -> list[Json]:
    """Return `counts` of the ratings 1 to 7, `mean` and its 95 % interval for each model with rated responses in Rank.

    Every labeler's rating counts. Leads' decisions and items with a known answer are excluded. A response written by several
    models counts once for each of them. Responses without a model are listed as "(no name)".
    """
    with task_facts(session, "rank") as facts:
        return facts.result("ratings", lambda: _ratings_by_model(facts))


def _ratings_by_model(facts: TaskFacts) -> list[Json]:
    groups: dict[str, list[list[int]]] = defaultdict(list)
    for each in facts.items.values():
        of_item: dict[str, list[int]] = {}
        for model, rating in each.models:
            of_item.setdefault(model or "(no name)", []).append(rating)
        for model, ratings in of_item.items():
            groups[model].append(ratings)
    return [_row(model, by_item) for model, by_item in sorted(groups.items())]


def _row(model: str, by_item: list[list[int]]) -> Json:
    counts = Counter(rating for ratings in by_item for rating in ratings)
    mean, half = mean_and_half_width(by_item)
    interval = {"low": None, "high": None} if half is None else {"low": rounded(mean - half), "high": rounded(mean + half)}
    return {
        "model": model,
        "counts": [counts[rating] for rating in range(RATINGS[0], RATINGS[1] + 1)],
        "ratings": counts.total(),
        "mean": rounded(mean),
        **interval,
    }


def mean_and_half_width(groups: list[list[int]]) -> tuple[float, float | None]:
    """Return the mean of all values and the half-width of its 95 % interval. Groups are the sampling units.

    The variance is the linearized variance of a ratio of two sums over groups (Cochran 1977, section 6.3). With one group,
    the half-width is None.
    """
    total = sum(map(len, groups))
    mean = sum(map(sum, groups)) / total
    if len(groups) < 2:
        return mean, None
    squares = sum((sum(values) - mean * len(values)) ** 2 for values in groups)
    return mean, Z95 * math.sqrt(squares * len(groups) / (len(groups) - 1)) / total
