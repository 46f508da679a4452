"""Several labelers' answers to one item into one. Answers are in the item's own order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from annotation_ui.tasks import Json


def combine(task: str, answers: list[Json]) -> list[Json]:
    """One answer for the item; for texts that people wrote (and talks with a model), each of them."""
    how: dict[str, Callable[[list[Json]], Json]] = {"rank": _rank, "rules": _rules, "compare": _compare}
    return [how[task](answers)] if task in how else answers


def _rank(answers: list[Json]) -> Json:
    """Order by mean rank (Borda); equal means tie. A rating is the mean's nearest, a flag needs more than half."""
    size = len(answers[0]["ranks"])
    # sums, not means: whole numbers compare exactly
    totals = [sum(answer["ranks"][i] for answer in answers) for i in range(size)]
    places = {total: place for place, total in enumerate(sorted(set(totals)), start=1)}
    return {
        "ranks": [places[total] for total in totals],
        "ratings": [_mean([answer["ratings"][i] for answer in answers]) for i in range(size)],
        "flags": [_frequent([answer["flags"][i] for answer in answers]) for i in range(size)],
    }


def _mean(ratings: list[int | None]) -> int | None:
    given = [rating for rating in ratings if rating is not None]
    return int(sum(given) / len(given) + 0.5) if given else None


def _frequent(flags: list[list[str]]) -> list[str]:
    counts = Counter(flag for named in flags for flag in named)
    return sorted(flag for flag, count in counts.items() if 2 * count > len(flags))


def _rules(answers: list[Json]) -> Json:
    """The verdict that most give; none most: unsure."""
    verdicts = {}
    for rule in answers[0]["verdicts"]:
        said = [answer["verdicts"][rule] for answer in answers if rule in answer["verdicts"]]
        notes = [each["note"] for each in said if each["note"]]
        verdicts[rule] = {"verdict": _majority([each["verdict"] for each in said], "unsure"), "note": "; ".join(notes)}
    return {"verdicts": verdicts}


def _compare(answers: list[Json]) -> Json:
    return {"choice": _majority([answer["choice"] for answer in answers], "tie")}


def _majority(votes: list[str], otherwise: str) -> str:
    first, *rest = Counter(votes).most_common()
    return otherwise if rest and rest[0][1] == first[1] else first[0]
