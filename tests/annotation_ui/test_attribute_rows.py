"""Attributes from verdicts, ratings and flags."""

from __future__ import annotations

from align.data.records import FLAGS
from annotation_ui.attribute_rows import attribute_rows


def verdict(rule: str, value: str, response: str = "Yo") -> dict[str, str]:
    return {"prompt": "Hi", "response": response, "rule": rule, "verdict": value}


def test_verdicts_of_a_response_are_one_row() -> None:
    rows = [verdict("sensible", "follows"), verdict("specific", "violates"), verdict("interesting", "unsure")]
    assert list(attribute_rows(rows)) == [{"prompt": "Hi", "response": "Yo", "attributes": {"sensible": 1, "specific": 0}}]
    assert list(attribute_rows([verdict("sensible", "unsure")])) == []


def test_a_ranking_gives_ratings_and_flags_of_each_response() -> None:
    flag = next(iter(FLAGS))
    row = {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2], "some_rated": [None, 3], "flags": [[flag], []]}
    first, second = attribute_rows([row])
    assert first["attributes"] == {name: int(name == flag) for name in FLAGS}
    assert second["attributes"] == {"rating": 3, **dict.fromkeys(FLAGS, 0)}
