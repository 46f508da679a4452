"""Questions of TruthfulQA, or custom ones in its format."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from align.data.fields import check_optional_text, check_text, check_texts, field_error, required_field
from align.data.readers import parse_rows
from align.eval.results import new_id


@dataclass(frozen=True)
class Question:
    """A question with its best answer (for MC1), and at least one correct and one incorrect answer.

    `where` names it in an error.
    """

    id: str
    where: str
    category: str
    text: str
    best: str
    correct: tuple[str, ...]
    incorrect: tuple[str, ...]

    @property
    def answers(self) -> list[str]:
        """Distinct answers to score."""
        return list(dict.fromkeys((self.best, *self.correct, *self.incorrect)))


def read_questions(source: str, skip_bad_rows: bool = False) -> list[Question]:
    """Read questions from a `.csv` with TruthfulQA's columns or JSON Lines. Raises as `parse_rows`."""
    parse = partial(_questions, source=source, seen=set())
    return parse_rows([source], parse, "no usable question", skip_bad_rows=skip_bad_rows)


def _questions(row: Mapping[str, Any], number: str, source: str, seen: set[str]) -> list[Question]:
    row = {name.lower().replace(" ", "_"): value for name, value in row.items()}  # TruthfulQA.csv has "Best Answer"
    texts = [check_text(required_field(row, name, "add it to the row"), name) for name in ("question", "best_answer")]
    lists = []
    for name in ("correct_answers", "incorrect_answers"):
        given = required_field(row, name, "add at least one answer")
        if isinstance(given, str):  # TruthfulQA.csv separates answers with semicolons
            given = [_closed(part) for part in given.split(";") if part.strip()]
            texts[1] = _closed(texts[1])
        answers = check_texts(given, name)
        if not answers:
            raise field_error(name, "is an empty list", "add at least one answer")
        lists.append(tuple(answer.strip() for answer in answers))
    category = check_optional_text(row.get("category"), "category") or "all"
    name = new_id(row, number, seen)
    return [Question(name, f"{source}: question {name}", category, texts[0].strip(), texts[1].strip(), *lists)]


def _closed(answer: str) -> str:
    """Add a final period to an answer of TruthfulQA.csv, as in its code (`split_multi_answer`) and in lm-eval's data."""
    return f"{answer.strip().removesuffix('.')}."
