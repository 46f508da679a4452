"""Compare: choose A, B, a tie or both bad for two responses without model names. The choices give win rates."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from align.core.statistics import majority
from annotation_ui.rendering.markdown import text_view
from annotation_ui.tasks.base import Json, Task, Value, require
from annotation_ui.tasks.fields import comment_field, prompt_view
from annotation_ui.tasks.rankings import joined_comments, preferences_of, ranking_fields, ranking_pairs, ranking_row

CHOICES = ("A", "B", "tie", "both_bad")
RANKS = {"A": [1, 2], "B": [2, 1], "tie": [1, 1], "both_bad": [1, 1]}


class Compare(Task):
    """Compares two responses."""

    name = "compare"
    title = "Compare two"
    comparable = True
    records: ClassVar = {"rankings": list, "pairs": ranking_pairs}
    answer_filters: ClassVar = {choice: choice for choice in CHOICES}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        return [ranking_fields(row, 2, 2)]

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        return [self.check(gold, contents[0], [])]

    def order_size(self, content: Json) -> int:
        return 2

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        return {
            "prompt": prompt_view(content["prompt"]),
            "responses": [text_view(content["responses"][index]) for index in order],
        }

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        require(answer.get("choice") in CHOICES, f"choice: must be one of {', '.join(CHOICES)}")
        return {"choice": answer["choice"], **comment_field(answer)}

    def canonical(self, answer: Json, order: list[int]) -> Json:
        """Return the answer with A as the item's first response and B as its second."""
        choice = answer["choice"]
        return {**answer, "choice": "AB"[order["AB".index(choice)]] if choice in ("A", "B") else choice}

    def shown(self, answer: Json, order: list[int]) -> Json:
        choice = answer["choice"]
        return {**answer, "choice": "AB"[order.index("AB".index(choice))] if choice in ("A", "B") else choice}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        return {"A": "A is better", "B": "B is better", "tie": "Tie", "both_bad": "Both bad"}[answer["choice"]]

    def rows(self, content: Json, answer: Json) -> list[Json]:
        choice = answer["choice"]
        flags = {"flags": [["both_bad"], ["both_bad"]]} if choice == "both_bad" else {}
        return [ranking_row(content, RANKS[choice], answer, **flags, choice=choice)]

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        return float(answer["choice"] == gold["choice"]) if "choice" in gold else None

    def combine(self, answers: list[Json]) -> Json:
        """Return the most frequent choice, or a tie if two choices are equally frequent."""
        return {"choice": majority([answer["choice"] for answer in answers], tie="tie"), **joined_comments(answers)}

    def similarity(self, one: Json, two: Json) -> float:
        return float(one["choice"] == two["choice"])

    def values(self, answer: Json) -> Iterable[Value]:
        return [Value("", "nominal", None, answer["choice"])]

    def questions(self, answer: Json) -> dict[Any, str]:
        return preferences_of(RANKS[answer["choice"]])
