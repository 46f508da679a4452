"""Rank: order K responses, allowing ties, and optionally rate and flag each response."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_uppercase
from typing import Any, ClassVar

from align.data.records import FLAGS, MAX_RESPONSES, MIN_RESPONSES, RATINGS
from annotation_ui.rendering.markdown import text_view
from annotation_ui.tasks.base import Json, Task, Value, require
from annotation_ui.tasks.fields import comment_field, prompt_view, text_field, unix_lines
from annotation_ui.tasks.rankings import (
    joined_comments,
    pairwise_agreement,
    preferences_of,
    ranking_attributes,
    ranking_fields,
    ranking_pairs,
    ranking_row,
)

MAX_RATING = RATINGS[1]
PER_RESPONSE = ("ranks", "ratings", "flags")  # answer fields with one value per response


def without_better(rows: Sequence[Json]) -> list[Json]:
    """Return rankings without the labelers' own responses (`better`)."""
    return [{field: value for field, value in row.items() if field != "better"} for row in rows]


def pairs_with_better(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield the pairs of rankings. A response written by the labeler (`better`) is preferred to all responses."""
    yield from ranking_pairs(rows)
    for row in rows:
        for better in row.get("better", ()):
            yield from ({"prompt": row["prompt"], "chosen": better, "rejected": each} for each in row["responses"])


def better_demonstrations(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield the labelers' own responses (`better`) as demonstrations."""
    for row in rows:
        yield from ({"prompt": row["prompt"], "completion": better} for better in row.get("better", ()))


class Rank(Task):
    """Ranks several responses."""

    name = "rank"
    title = "Rank responses"
    comparable = True
    records: ClassVar = {
        "rankings": without_better,
        "pairs": pairs_with_better,
        "attributes": ranking_attributes,
        "demonstrations": better_demonstrations,
    }
    answer_filters: ClassVar = FLAGS

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        return [ranking_fields(row, MIN_RESPONSES, MAX_RESPONSES)]

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        return [{"ranks": self.check(gold, contents[0], [])["ranks"]}]

    def order_size(self, content: Json) -> int:
        return len(content["responses"])

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        return {
            "prompt": prompt_view(content["prompt"]),
            "responses": [text_view(content["responses"][index]) for index in order],
            "flags": FLAGS,
            "max_rating": MAX_RATING,
        }

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        size = len(content["responses"])
        ranks = answer.get("ranks")
        require(isinstance(ranks, list) and len(ranks) == size, f"ranks: must have {size} entries")
        assert isinstance(ranks, list)
        require(all(type(rank) is int for rank in ranks), "ranks: must be integers")
        require(set(ranks) == set(range(1, len(set(ranks)) + 1)), "ranks: must be 1, 2, 3, ... without gaps")
        ratings = answer.get("ratings") or [None] * size
        require(isinstance(ratings, list) and len(ratings) == size, f"ratings: must have {size} entries")
        known = (None, *range(1, MAX_RATING + 1))
        require(all(type(r) in (int, type(None)) and r in known for r in ratings), "ratings: must be 1 to 7, or null")
        flags = answer.get("flags") or [[] for _ in range(size)]
        require(isinstance(flags, list) and len(flags) == size, f"flags: must have {size} entries")
        for chosen in flags:
            known_flags = isinstance(chosen, list) and all(isinstance(flag, str) and flag in FLAGS for flag in chosen)
            require(known_flags, "flags: unknown flag")
        better = text_field(answer, "better", empty=True)
        same = unix_lines(better) in map(unix_lines, content["responses"])
        require(not same or not better.strip(), "better: must differ from the responses")
        written = {"better": [better]} if better.strip() else {}
        checked = {"ranks": ranks, "ratings": ratings, "flags": [sorted(set(chosen)) for chosen in flags]}
        return {**checked, **written, **comment_field(answer)}

    def canonical(self, answer: Json, order: list[int]) -> Json:
        places = [order.index(index) for index in range(len(order))]  # item index -> shown index
        return self.shown(answer, places)

    def shown(self, answer: Json, order: list[int]) -> Json:
        return {
            **answer,
            **{field: [answer[field][index] for index in order] for field in PER_RESPONSE if field in answer},
        }

    def draft(self, answer: Json) -> Json:
        return {**answer, "better": answer.get("better", [""])[0]}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        tiers: dict[int, list[str]] = {}
        for letter, rank in zip(ascii_uppercase, answer["ranks"], strict=False):
            tiers.setdefault(rank, []).append(letter)
        order = " > ".join(" = ".join(tiers[rank]) for rank in sorted(tiers))
        return f"{order}; wrote a better answer" if answer.get("better") else order

    def written(self, answer: Json) -> Sequence[str]:
        return list(answer.get("better", ()))

    def rows(self, content: Json, answer: Json) -> list[Json]:
        more = {}
        rated = [rating is not None for rating in answer["ratings"]]
        if any(rated):  # training reads `ratings` only if every response has one
            more["ratings" if all(rated) else "some_rated"] = answer["ratings"]
        if any(answer["flags"]):
            more["flags"] = answer["flags"]
        if answer.get("better"):
            more["better"] = answer["better"]
        return [ranking_row(content, answer["ranks"], answer, **more)]

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        return pairwise_agreement(answer["ranks"], gold["ranks"]) if "ranks" in gold else None

    def combine(self, answers: list[Json]) -> Json:
        """Order responses by mean fractional rank. Equal means tie.

        Ratings are rounded means. A flag is kept if a majority of labelers set it.
        """
        size = len(answers[0]["ranks"])
        places_given = [_doubled_places(answer["ranks"]) for answer in answers]
        totals = [sum(given[i] for given in places_given) for i in range(size)]
        places = {total: place for place, total in enumerate(sorted(set(totals)), start=1)}
        written = list(dict.fromkeys(text for answer in answers for text in answer.get("better", ())))
        return {
            "ranks": [places[total] for total in totals],
            "ratings": [_mean_rating([answer["ratings"][i] for answer in answers]) for i in range(size)],
            "flags": [_majority_flags([answer["flags"][i] for answer in answers]) for i in range(size)],
            **({"better": written} if written else {}),
            **joined_comments(answers),
        }

    def similarity(self, one: Json, two: Json) -> float:
        return pairwise_agreement(one["ranks"], two["ranks"])

    def values(self, answer: Json) -> Iterable[Value]:
        """Yield the rank and the rating of each response. Each response is a unit."""
        for scale in ("ranks", "ratings"):
            yield from (Value(scale, "ordinal", index, value) for index, value in enumerate(answer[scale]))

    def questions(self, answer: Json) -> dict[Any, str]:
        return preferences_of(answer["ranks"])

    def marks(self, answer: Json) -> set[str]:
        return {flag for flags in answer["flags"] for flag in flags}


def _doubled_places(ranks: list[int]) -> list[int]:
    """Return twice the fractional rank of each response.

    Tied responses share the mean of the positions that they occupy. Doubling keeps the sums integers, which compare exactly.
    Dense ranks would give answers with many ties less weight.
    """
    return [2 * sum(other < rank for other in ranks) + ranks.count(rank) + 1 for rank in ranks]


def _mean_rating(ratings: list[int | None]) -> int | None:
    given = [rating for rating in ratings if rating is not None]
    return int(sum(given) / len(given) + 0.5) if given else None


def _majority_flags(flags: list[list[str]]) -> list[str]:
    counts = Counter(flag for flags_of_answer in flags for flag in flags_of_answer)
    return sorted(flag for flag, count in counts.items() if 2 * count > len(flags))
