"""Correct answers: edit a model's answer. The result is a demonstration, and is preferred to the original."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from annotation_ui.rendering.markdown import text_view
from annotation_ui.tasks.base import Json, Task, require
from annotation_ui.tasks.fields import excerpt, prompt_view, response_fields, text_field, unix_lines

CORRECTED, ACCEPTED = "corrected", "accepted"


def demonstrations_of(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield corrected and accepted answers as demonstrations."""
    for row in rows:
        yield {"prompt": row["prompt"], "completion": row["completion"]}


def correction_pairs(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield a pair for each corrected answer, which is preferred to the original."""
    for row in rows:
        if row["completion"] != row["original"]:
            yield {"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["original"]}


class Edit(Task):
    """Collects corrections of a model's answers, and answers accepted unchanged."""

    name = "edit"
    title = "Correct answers"
    records: ClassVar = {"demonstrations": demonstrations_of, "pairs": correction_pairs}
    answer_filters: ClassVar = {CORRECTED: CORRECTED, ACCEPTED: "accepted without a change"}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """Return one item per response, with the line ends of a browser's text field."""
        return [{**fields, "response": unix_lines(fields["response"])} for fields in response_fields(row)]

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        return {"prompt": prompt_view(content["prompt"]), "response": text_view(content["response"])}

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        completion = unix_lines(text_field(answer, "completion"))
        if completion == unix_lines(content["response"]):
            completion = content["response"]
        expected = ACCEPTED if completion == content["response"] else CORRECTED
        require(answer.get("outcome") == expected, f"outcome: must be {expected} for this completion")
        return {"completion": completion, "outcome": expected}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        return f"{answer['outcome'].capitalize()}: {excerpt(answer['completion'])}"

    def written(self, answer: Json) -> Sequence[str]:
        return [answer["completion"]]

    def rows(self, content: Json, answer: Json) -> list[Json]:
        return [{"prompt": content["prompt"], "completion": answer["completion"], "original": content["response"]}]

    def marks(self, answer: Json) -> set[str]:
        return {answer["outcome"]}
