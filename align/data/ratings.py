"""Ratings of single answers, one a row, and the rankings that the answers to one prompt make together."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from align.data.conversation import Conversation, check_answer, check_prompt
from align.data.fields import check_score, field_error, required_field
from align.data.records import Ranking, Record, evenly_spaced, ranks_from_scores, set_checked


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer(Record):
    """A response and a number for it, such as stars; the highest is the best."""

    prompt: Conversation
    response: str
    rating: float
    id: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        response = check_answer(self.response, "response", may_be_empty=True)
        rating = check_score(self.rating, "rating")
        if not math.isfinite(rating):  # the mean of the ratings of a response may not exist
            raise field_error("rating", f"is {rating}", "use a finite number")
        set_checked(self, prompt=check_prompt(self.prompt), response=response, rating=rating)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The same for rows of other projects, whose names of other fields may be similar."""
        needed = {name: required_field(row, name, "add it") for name in ("prompt", "response", "rating")}
        return cls(**needed, id=row.get("id"), category=row.get("category"))


class RankedRatings(NamedTuple):
    """The rankings that ratings make, and how many prompts have only one rated response."""

    rankings: list[Ranking]
    single: int


def rank_ratings(answers: Iterable[RatedAnswer]) -> RankedRatings:
    """One ranking for each prompt with two or more responses, which may be anywhere among the answers.

    A response that occurs more than once, as with several labelers, gets the mean of its ratings. Of more than nine
    responses, nine evenly spaced by rank are kept.
    """
    by_prompt: dict[tuple[tuple[str, str], ...], list[RatedAnswer]] = {}
    for answer in answers:
        by_prompt.setdefault(tuple((turn["role"], turn["content"]) for turn in answer.prompt), []).append(answer)
    found = [ranking for group in by_prompt.values() if (ranking := _ranking(group)) is not None]
    return RankedRatings(found, len(by_prompt) - len(found))


def _ranking(answers: list[RatedAnswer]) -> Ranking | None:
    ratings: dict[str, list[float]] = {}
    for answer in answers:
        ratings.setdefault(answer.response, []).append(answer.rating)
    if len(ratings) < 2:
        return None
    means = {text: sum(given) / len(given) for text, given in ratings.items()}
    order = sorted(means, key=lambda text: -means[text])
    kept = {order[i] for i in evenly_spaced(len(order))}
    responses = tuple(text for text in means if text in kept)
    first = answers[0]
    ranks = ranks_from_scores([means[text] for text in responses])
    return Ranking(prompt=first.prompt, responses=responses, ranks=ranks, id=first.id, category=first.category)
