"""Questions with right and wrong answers: TruthfulQA.csv as its authors publish it, or JSON Lines of your own."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from align.core.errors import UserError
from align.core.files import resolve_path
from align.data.fields import check_id, check_text, check_texts, field_error, required_field
from align.data.sources import SourceRow, iter_rows
from align.eval.core.rows import parse_rows

COLUMNS = {
    "Category": "category",
    "Question": "question",
    "Best Answer": "best_answer",
    "Correct Answers": "correct_answers",
    "Incorrect Answers": "incorrect_answers",
}
"""The columns of TruthfulQA.csv that are read, and the fields of JSON Lines that mean the same."""


@dataclass(frozen=True)
class Question:
    """A question with reference answers.

    Attributes:
        id: unique in its file; TruthfulQA.csv has none, so its rows are numbered from 1.
        best: the one answer that MC1 counts as right.
        correct, incorrect: at least one each, without spaces at their ends.
    """

    id: str
    category: str
    text: str
    best: str
    correct: tuple[str, ...]
    incorrect: tuple[str, ...]

    def with_full_stops(self) -> "Question":
        """The same question with a full stop after every answer that has none, as TruthfulQA's own code adds it."""
        correct, incorrect = (tuple(map(add_full_stop, answers)) for answers in (self.correct, self.incorrect))
        return replace(self, best=add_full_stop(self.best), correct=correct, incorrect=incorrect)

    @property
    def answers(self) -> list[str]:
        """The different answers, each once: what a model has to read."""
        return list(dict.fromkeys((self.best, *self.correct, *self.incorrect)))


def add_full_stop(answer: str) -> str:
    """The answer with a full stop at its end."""
    return answer if answer.endswith(".") else answer + "."


def read_questions(source: str, skip_bad_rows: bool = False) -> list[Question]:
    """The questions of a file: `.csv` with TruthfulQA's columns, or JSON Lines with the fields of `COLUMNS`.

    Args:
        source: path of the file.
        skip_bad_rows: log the number of bad rows and the first few, and return the others.

    Raises:
        UserError: one line, for a file that cannot be read, a missing column, a bad row, or no usable row at all.
    """
    seen: set[str] = set()

    def parse(row: Mapping[str, Any], number: str) -> list[Question]:
        question = _question(row, number)
        if question.id in seen:
            raise field_error("id", f"'{question.id}' appears twice", "give every question a unique id")
        seen.add(question.id)
        return [question]

    rows = _csv_rows(source) if source.lower().endswith(".csv") else iter_rows(source)
    return parse_rows(rows, parse, skip_bad_rows, f"{source}: no usable question")


def _question(row: Mapping[str, Any], number: str) -> Question:
    texts = [check_text(required_field(row, name, "write it into the row"), name) for name in ("question", "best_answer")]
    lists = []
    for name in ("correct_answers", "incorrect_answers"):
        answers = check_texts(required_field(row, name, "write at least one answer"), name)
        if not answers:
            raise field_error(name, "is an empty list", "write at least one answer")
        lists.append(tuple(answer.strip() for answer in answers))
    category = row.get("category")
    category = check_text(category, "category") if category is not None else "all"
    return Question(check_id(row.get("id")) or number, category, texts[0].strip(), texts[1].strip(), *lists)


def _csv_rows(source: str) -> Iterator[SourceRow]:
    """The rows of TruthfulQA.csv under the names of the JSON fields, answers split at `;`.

    Raises:
        UserError: for a missing column, or a file that is not CSV in UTF-8.
    """
    try:
        with resolve_path(source).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or [])]
            if missing:
                raise UserError(f"{source}: column '{missing[0]}' is missing; the columns needed are {', '.join(COLUMNS)}")
            for row in reader:
                fields: dict[str, Any] = {name: row[column] for column, name in COLUMNS.items()}
                for name in ("correct_answers", "incorrect_answers"):
                    fields[name] = [part.strip() for part in (fields[name] or "").split(";") if part.strip()]
                yield SourceRow(f"{source}:{reader.line_num}", row=fields)
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror or error}); check the path") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{source}: not a CSV file in UTF-8 ({error}); export it again") from error
