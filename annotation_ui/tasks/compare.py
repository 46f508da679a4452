"""Compare: responses of two models without their names. A, B, a tie, or both bad; win rates are counted from these."""

from __future__ import annotations

from collections.abc import Sequence

from annotation_ui.markdown import text_view
from annotation_ui.tasks.base import Json, Task, comment_field, prompt_view, ranking_fields, require

CHOICES = ("A", "B", "tie", "both_bad")
RANKS = {"A": [1, 2], "B": [2, 1], "tie": [1, 1], "both_bad": [1, 1]}


class Compare(Task):
    """Which of two responses is better."""

    name = "compare"
    title = "Compare two"

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        return [ranking_fields(row, 2, 2)]

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
        """A is the item's first response, B its second."""
        choice = answer["choice"]
        return {**answer, "choice": "AB"[order["AB".index(choice)]] if choice in ("A", "B") else choice}

    def shown(self, answer: Json, order: list[int]) -> Json:
        choice = answer["choice"]
        return {**answer, "choice": "AB"[order.index("AB".index(choice))] if choice in ("A", "B") else choice}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        return {"A": "A is better", "B": "B is better", "tie": "Tie", "both_bad": "Both bad"}[answer["choice"]]

    def rows(self, content: Json, answer: Json) -> list[Json]:
        row = {"prompt": content["prompt"], "responses": content["responses"], "ranks": RANKS[answer["choice"]]}
        if answer["choice"] == "both_bad":
            row["flags"] = [["both_bad"], ["both_bad"]]
        row |= comment_field(answer)
        if content.get("model"):
            row["model"] = content["model"]
        return [row]

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        return float(answer["choice"] == gold["choice"]) if "choice" in gold else None
