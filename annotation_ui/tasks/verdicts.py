"""The shared parts of tasks that judge a response by rules (Judge rules, Probe)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from align.data.records import VERDICTS
from annotation_ui.tasks.base import BadInputError, Json
from annotation_ui.tasks.fields import text_field

ATTRIBUTE_VALUES = {"follows": 1, "violates": 0}
"""The value of the attribute named after a rule, by the verdict: 1 if the rule's sentence is true."""


def check_verdict(judged: Any) -> Json:
    """{verdict, note} with known fields only.

    Raises:
        BadInputError: if the verdict is unknown.
    """
    if not isinstance(judged, dict) or judged.get("verdict") not in VERDICTS:
        raise BadInputError(f"verdict: must be one of {', '.join(VERDICTS)}")
    return {"verdict": judged["verdict"], "note": text_field(judged, "note", empty=True)}


def verdict_row(prompt: Any, response: str, rule: str, judged: Json) -> Json:
    """One rule judgment as a row (docs/data.md)."""
    row = {"prompt": prompt, "response": response, "rule": rule, "verdict": judged["verdict"]}
    return {**row, "note": judged["note"]} if judged["note"] else row


def verdict_attributes(rows: Sequence[Json]) -> Iterable[Json]:
    """One row for each response with the attributes that one judgment gives it; none if all verdicts are unsure."""
    found: dict[str, Json] = {}
    for row in rows:
        of_response = {"prompt": row["prompt"], "response": row["response"], "attributes": {}}
        attributes = found.setdefault(row["response"], of_response)["attributes"]
        if row["verdict"] in ATTRIBUTE_VALUES:
            attributes[row["rule"]] = ATTRIBUTE_VALUES[row["verdict"]]
    return [row for row in found.values() if row["attributes"]]


def verdict_marks(verdicts: Json) -> set[str]:
    """The rules that were not judged as followed, with their verdicts."""
    return {f"{rule}: {given['verdict']}" for rule, given in verdicts.items() if given["verdict"] != "follows"}
