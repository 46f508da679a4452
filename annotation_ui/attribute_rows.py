"""Attributes of a response (docs/data.md) from labelers' verdicts, ratings and flags in any task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from align.data.records import FLAGS
from annotation_ui.tasks import Json

ATTRIBUTE_VALUES = {"follows": 1, "violates": 0}
"""The value of the attribute named after a rule, by the verdict: 1 if the rule's sentence is true."""


def attribute_rows(rows: Sequence[Json]) -> Iterator[Json]:
    """One row for each response, with all of its attributes by one judgment.

    Args:
        rows: the rows of one judgment: verdicts on a response, or a ranking of several.
    """
    verdicts: dict[str, Json] = {}
    for row in rows:
        if "ranks" in row:
            yield from _rows_of_ranking(row)
            continue
        found = verdicts.setdefault(
            row["response"], {"prompt": row["prompt"], "response": row["response"], "attributes": {}}
        )
        if row["verdict"] in ATTRIBUTE_VALUES:
            found["attributes"][row["rule"]] = ATTRIBUTE_VALUES[row["verdict"]]
    yield from (row for row in verdicts.values() if row["attributes"])


def _rows_of_ranking(row: Json) -> Iterator[Json]:
    """Ratings as `rating`, and every flag as an attribute that is 1 where it was set."""
    size = len(row["responses"])
    ratings = row.get("ratings") or row.get("some_rated") or [None] * size
    flags = row.get("flags") or [[] for _ in range(size)]
    for response, rating, chosen in zip(row["responses"], ratings, flags, strict=True):
        attributes: Json = {} if rating is None else {"rating": rating}
        attributes |= {flag: int(flag in chosen) for flag in FLAGS}
        yield {"prompt": row["prompt"], "response": response, "attributes": attributes}
