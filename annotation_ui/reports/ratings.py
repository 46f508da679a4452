"""The ratings from 1 to 7 of each model's responses (InstructGPT's scale): distribution, mean and interval."""

import math
from collections import Counter, defaultdict

from sqlalchemy.orm import Session

from align.data.records import RATINGS
from annotation_ui.reports.overview import labelers_judgments, rounded
from annotation_ui.tasks import Json

Z95 = 1.959964  # two-sided 95 % of the normal distribution


def ratings_by_model(session: Session) -> list[Json]:
    """One row for each model with rated responses in Rank: `counts` of the ratings 1 to 7, `mean`, and its 95 % interval.

    Every labeler's rating counts. Leads' decisions and items with a known answer are left out. A response that several
    models wrote counts for each. Responses without a model are those of "(no name)".
    """
    sums: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for judgment in labelers_judgments(session, "rank"):
        content, ratings = judgment.item.content, judgment.answer["ratings"]
        if judgment.item.gold is not None:
            continue
        models = content.get("model") or [None] * len(ratings)
        for rating, model, others in zip(ratings, models, content.get("also_by") or [[]] * len(ratings), strict=True):
            for name in (model, *others) if rating is not None else ():
                sums[name or "(no name)"][judgment.item.id].append(rating)
    return [_row(model, list(by_item.values())) for model, by_item in sorted(sums.items())]


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
    """The mean of all values, and half the width of its 95 % interval if whole groups are the units of sampling.

    The variance is that of a ratio of two sums over groups (linearized, Cochran 1977, section 6.3); None for one group.
    """
    total = sum(map(len, groups))
    mean = sum(map(sum, groups)) / total
    if len(groups) < 2:
        return mean, None
    squares = sum((sum(values) - mean * len(values)) ** 2 for values in groups)
    return mean, Z95 * math.sqrt(squares * len(groups) / (len(groups) - 1)) / total
