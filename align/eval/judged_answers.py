"""Labelled answers that a judge learns from, a split that keeps every question on one side, and how good a judge is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from align.data.fields import check_row, check_text, field_error, require
from align.data.sources import iter_rows
from align.errors import UserError
from align.generation import generator

Asks = Literal["truth", "info"]
WORDS: dict[Asks, str] = {"truth": "True", "info": "Helpful"}
"""What the texts of TruthfulQA's own judges end in, before ` yes` or ` no`."""
FORM = re.compile(r"Q: (.*?)\nA:(.*)\n(\w+):", re.DOTALL)
SPLIT = 7
"""What the random numbers of `generator(seed, SPLIT)` are for."""


@dataclass(frozen=True)
class Judged:
    """An answer to a question, and whether it is true (or informative)."""

    question: str
    answer: str
    label: bool


def read_judged(source: str, asks: Asks, skip_bad_rows: bool = False) -> list[Judged]:
    """The labelled answers of a file.

    A row is `{"question": text, "answer": text, "label": true or false}`, or one of TruthfulQA's own:
    `{"prompt": "Q: ...\\nA: ...\\nTrue:", "completion": " yes"}`.

    Raises:
        UserError: one line, for a bad row, or a file that holds only one of the two labels.
    """
    found = []
    for row in iter_rows(source):
        try:
            if row.error is not None:
                raise UserError(row.error)
            found.append(_judged(check_row(row.row), asks))
        except UserError as error:
            if not skip_bad_rows:
                raise UserError(f"{row.where}: {error}") from error
    if len({each.label for each in found}) < 2:
        raise UserError(f"{source}: a judge needs answers of both labels to learn from; these have {len(found)} rows of one")
    return found


def _judged(row: Mapping[str, Any], asks: Asks) -> Judged:
    if row.get("prompt") is None:
        label = require(row, "label", "write true or false")
        if not isinstance(label, bool):
            raise field_error("label", f"is {label!r}", "write true or false")
        answer = check_text(require(row, "answer", "write the answer"), "answer", may_be_empty=True)
        return Judged(check_text(require(row, "question", "write the question"), "question").strip(), answer.strip(), label)
    parts = FORM.fullmatch(check_text(row["prompt"], "prompt"))
    if parts is None or parts[3] != WORDS[asks]:
        raise field_error("prompt", f"is not 'Q: ...', 'A: ...', '{WORDS[asks]}:'", f"use a file for the judge of {asks}")
    completion = str(require(row, "completion", "write ' yes' or ' no'")).strip()
    if completion not in ("yes", "no"):
        raise field_error("completion", f"is {completion!r}", "write ' yes' or ' no'")
    return Judged(parts[1].strip(), parts[2].strip(), completion == "yes")


def split_by_question(rows: Sequence[Judged], share: float, seed: int) -> tuple[list[Judged], list[Judged]]:
    """Rows to learn from and rows held out, so that no question is in both: a judge may not know the answer by heart.

    Args:
        share: of the questions that is held out; at least one question is.

    Raises:
        UserError: if there is only one question.
    """
    questions = sorted({row.question for row in rows})
    if len(questions) < 2:
        raise UserError("the judge's data has one question; it needs more, to hold some of them out")
    order = generator(seed, SPLIT).permutation(len(questions))
    count = min(len(questions) - 1, max(1, round(share * len(questions))))
    held = {questions[number] for number in order[:count]}
    return [row for row in rows if row.question not in held], [row for row in rows if row.question in held]


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Area under the ROC curve: how often a row labelled yes scores above one labelled no; a tie counts half.

    By rank sums (Mann and Whitney 1947). 0.5 where one of the labels is missing: nothing can be told apart.
    """
    yes = np.asarray(labels, dtype=bool)
    _, place, counts = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    ones = int(yes.sum())
    zeros = len(yes) - ones
    if not ones or not zeros:
        return 0.5
    return float((ranks[yes].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def calibration_error(probabilities: Sequence[float], labels: Sequence[bool], bins: int = 10) -> float:
    """Expected calibration error: |mean probability - share of yes| over equal bins, by their rows (Guo et al. 2017)."""
    stated, yes = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    place = np.minimum((stated * bins).astype(int), bins - 1)
    gaps = [abs(stated[place == number].sum() - yes[place == number].sum()) for number in range(bins)]
    return float(sum(gaps) / len(stated))
