"""Combines several labelers' answers to one item. Answers are in the item's stored order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from align.core.statistics import majority
from annotation_ui.tasks import Json


def aggregate_answers(task: str, answers: list[Json]) -> list[Json]:
    """Combine the answers to one item into one answer.

    Demonstrations and probing conversations cannot be combined: all of them are returned.
    """
    combiners: dict[str, Callable[[list[Json]], Json]] = {"rank": _mean_rank, "rules": _majority_rules, "compare": _majority}
    return [combiners[task](answers)] if task in combiners else answers


def _mean_rank(answers: list[Json]) -> Json:
    """Order by mean rank (Borda); equal means tie. Ratings are rounded means; a flag needs more than half of the answers."""
    size = len(answers[0]["ranks"])
    # sums, not means: whole numbers compare exactly
    totals = [sum(answer["ranks"][i] for answer in answers) for i in range(size)]
    places = {total: place for place, total in enumerate(sorted(set(totals)), start=1)}
    return {
        "ranks": [places[total] for total in totals],
        "ratings": [_mean_rating([answer["ratings"][i] for answer in answers]) for i in range(size)],
        "flags": [_majority_flags([answer["flags"][i] for answer in answers]) for i in range(size)],
        **_comments(answers),
    }


def _comments(answers: list[Json]) -> Json:
    comments = [answer["comment"] for answer in answers if answer.get("comment")]
    return {"comment": "; ".join(comments)} if comments else {}


def _mean_rating(ratings: list[int | None]) -> int | None:
    given = [rating for rating in ratings if rating is not None]
    return int(sum(given) / len(given) + 0.5) if given else None


def _majority_flags(flags: list[list[str]]) -> list[str]:
    counts = Counter(flag for flags_of_answer in flags for flag in flags_of_answer)
    return sorted(flag for flag, count in counts.items() if 2 * count > len(flags))


def _majority_rules(answers: list[Json]) -> Json:
    """The most frequent verdict of each rule among those who were asked; `unsure` on a tie."""
    verdicts = {}
    for rule in dict.fromkeys(rule for answer in answers for rule in answer["verdicts"]):
        judged = [answer["verdicts"][rule] for answer in answers if rule in answer["verdicts"]]
        notes = [verdict["note"] for verdict in judged if verdict["note"]]
        winner = majority([verdict["verdict"] for verdict in judged], tie="unsure")
        verdicts[rule] = {"verdict": winner, "note": "; ".join(notes)}
    return {"verdicts": verdicts}


def _majority(answers: list[Json]) -> Json:
    return {"choice": majority([answer["choice"] for answer in answers], tie="tie"), **_comments(answers)}
