"""Rank: put K responses in order, with ties allowed and an optional quality rating and flags for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from string import ascii_uppercase
from typing import Any

from align.data.records import FLAGS, MAX_RESPONSES, MIN_RESPONSES, RATINGS
from annotation_ui.markdown import text_view
from annotation_ui.tasks.base import Json, Task, comment_field, prompt_view, ranking_fields, require, unshuffle

MAX_RATING = RATINGS[1]
PER_RESPONSE = ("ranks", "ratings", "flags")  # the fields of an answer with a value for each response


class Rank(Task):
    """An order of several responses."""

    name = "rank"
    title = "Rank responses"

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        return [ranking_fields(row, MIN_RESPONSES, MAX_RESPONSES)]

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
        require(isinstance(ranks, list) and len(ranks) == size, f"ranks: needs one rank for each of {size} responses")
        assert isinstance(ranks, list)
        require(all(type(rank) is int for rank in ranks), "ranks: must be whole numbers")
        require(set(ranks) == set(range(1, len(set(ranks)) + 1)), "ranks: must be 1, 2, 3 ... without a gap")
        ratings = answer.get("ratings") or [None] * size
        require(isinstance(ratings, list) and len(ratings) == size, f"ratings: needs {size} values")
        known = (None, *range(1, MAX_RATING + 1))
        require(all(type(r) in (int, type(None)) and r in known for r in ratings), "ratings: 1 to 7, or none")
        flags = answer.get("flags") or [[] for _ in range(size)]
        require(isinstance(flags, list) and len(flags) == size, f"flags: needs {size} lists")
        for chosen in flags:
            known_flags = isinstance(chosen, list) and all(isinstance(flag, str) and flag in FLAGS for flag in chosen)
            require(known_flags, "flags: unknown flag")
        checked = {"ranks": ranks, "ratings": ratings, "flags": [sorted(set(chosen)) for chosen in flags]}
        return {**checked, **comment_field(answer)}

    def canonical(self, answer: Json, order: list[int]) -> Json:
        return {**answer, **{field: unshuffle(answer[field], order) for field in PER_RESPONSE}}

    def shown(self, answer: Json, order: list[int]) -> Json:
        return {**answer, **{field: [answer[field][index] for index in order] for field in PER_RESPONSE}}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        tiers: dict[int, list[str]] = {}
        for letter, rank in zip(ascii_uppercase, answer["ranks"], strict=False):
            tiers.setdefault(rank, []).append(letter)
        return " > ".join(" = ".join(tiers[rank]) for rank in sorted(tiers))

    def rows(self, content: Json, answer: Json) -> list[Json]:
        row = {"prompt": content["prompt"], "responses": content["responses"], "ranks": answer["ranks"]}
        rated = [rating is not None for rating in answer["ratings"]]
        if any(rated):  # training takes ratings of all responses or of none
            row["ratings" if all(rated) else "some_rated"] = answer["ratings"]
        if any(answer["flags"]):
            row["flags"] = answer["flags"]
        row |= comment_field(answer)
        if content.get("model"):
            row["model"] = content["model"]
        return [row]

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        return pairwise_agreement(answer["ranks"], gold["ranks"]) if "ranks" in gold else None


def pairwise_agreement(ranks: list[Any], others: list[Any]) -> float:
    """Share of the pairs of responses that two rankings order alike: better, worse or tied."""
    pairs = list(combinations(range(len(ranks)), 2))
    alike = sum(_sign(ranks[i] - ranks[j]) == _sign(others[i] - others[j]) for i, j in pairs)
    return alike / len(pairs)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
