"""Shared parts of tasks that order responses (Rank, Compare)."""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

from align.data.records import FLAGS, Ranking
from annotation_ui.tasks.base import Json, require
from annotation_ui.tasks.fields import MAX_TEXT, checked_record, comment_field, model_names

BETTER, TIE, WORSE = "better", "tie", "worse"


def ranking_fields(row: Json, fewest: int, most: int) -> Json:
    """Return the fields of an item with `fewest` to `most` distinct responses.

    Equal responses are merged. Responses that are empty or only whitespace are equal. `also_by` then lists the other models
    of each merged response. A single name as `model` applies to all responses.
    """
    require(isinstance(row.get("responses"), list), "responses: must be a list of texts")
    responses = row["responses"]
    models = model_names(row, len(responses))
    comparable = [response if not isinstance(response, str) or response.strip() else "" for response in responses]
    first = [i for i, response in enumerate(comparable) if response not in comparable[:i]]
    require(
        "gold" not in row or len(first) == len(responses),
        "responses: contains duplicates, which an item with a known answer must not have",
    )
    wanted = str(most) if fewest == most else f"{fewest} to {most}"
    require(fewest <= len(first) <= most, f"responses: needs {wanted} distinct texts, has {len(first)}")
    fields = {"prompt": row.get("prompt"), "responses": [responses[i] for i in first]}
    if row.get("model") is not None:
        fields["model"] = [models[i] for i in first]
    if row.get("finish_reason") is not None:
        reasons = row["finish_reason"]
        require(
            isinstance(reasons, list) and len(reasons) == len(responses), "finish_reason: must have one entry per response"
        )
        fields["finish_reason"] = [reasons[i] for i in first]
    checked_record(Ranking, {**fields, "ranks": list(range(1, len(first) + 1))})
    for number, response in enumerate(responses):
        require(len(response) <= MAX_TEXT, f"responses[{number}]: longer than {MAX_TEXT} characters")
    if "model" in fields and len(first) < len(responses):
        require(all(isinstance(name, str) for name in models), "model: must be a list of names")
        by_text = [[name for name, text in zip(models, comparable, strict=True) if text == comparable[i]] for i in first]
        if any(also := [list(dict.fromkeys(names))[1:] for names in by_text]):
            fields["also_by"] = also
    return fields


def ranking_row(content: Json, ranks: Sequence[int], answer: Json, **more: Any) -> Json:
    """Return a ranking as a row (docs/data.md), with the comment, model names and finish reasons if present."""
    row = {"prompt": content["prompt"], "responses": content["responses"], "ranks": ranks, **more, **comment_field(answer)}
    return row | {field: content[field] for field in ("model", "also_by", "finish_reason") if content.get(field)}


def ranking_pairs(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield a row for each pair of responses that are not tied."""
    for row in rows:
        for i, j in combinations(range(len(row["ranks"])), 2):
            if row["ranks"][i] == row["ranks"][j]:
                continue  # a tie gives no preference
            better, worse = (i, j) if row["ranks"][i] < row["ranks"][j] else (j, i)
            pair = {"prompt": row["prompt"], "chosen": row["responses"][better], "rejected": row["responses"][worse]}
            reasons = row.get("finish_reason")
            yield pair | ({"finish_reason": [reasons[better], reasons[worse]]} if reasons else {})


def ranking_attributes(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield a row for each response, with `rating` and each flag (0 or 1) as attributes."""
    for row in rows:
        size = len(row["responses"])
        ratings = row.get("ratings") or row.get("some_rated") or [None] * size
        flags = row.get("flags") or [[] for _ in range(size)]
        for response, rating, chosen in zip(row["responses"], ratings, flags, strict=True):
            attributes: Json = {} if rating is None else {"rating": rating}
            attributes |= {flag: int(flag in chosen) for flag in FLAGS}
            yield {"prompt": row["prompt"], "response": response, "attributes": attributes}


def preferences_of(ranks: Sequence[int]) -> dict[tuple[int, int], str]:
    """Map each ordered pair (i, j) to BETTER, WORSE or TIE, the preference for response i over j.

    Both (i, j) and (j, i) are included so that the order of responses does not affect the reliability estimates.
    """
    return {
        (i, j): TIE if ranks[i] == ranks[j] else BETTER if ranks[i] < ranks[j] else WORSE
        for i, j in permutations(range(len(ranks)), 2)
    }


def pairwise_agreement(ranks: Sequence[int], others: Sequence[int]) -> float:
    """Return the fraction of response pairs that two rankings order the same way, including ties."""
    first, second = preferences_of(ranks), preferences_of(others)
    return sum(first[pair] == second[pair] for pair in first) / len(first)


def joined_comments(answers: Sequence[Json]) -> Json:
    """Join the labelers' comments into one `comment` field. Without comments, return no field."""
    comments = [answer["comment"] for answer in answers if answer.get("comment")]
    return {"comment": "; ".join(comments)} if comments else {}
