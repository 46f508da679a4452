"""Labeled answers that a judge of answers learns from, and their split by question."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.data.fields import check_text, field_error, required_field
from align.data.sources import iter_rows
from align.eval.core.rows import parse_rows

Aspect = Literal["truth", "info"]
"""What a judge decides about an answer: whether it is true, or whether it is informative."""
ASPECT_WORDS: dict[Aspect, str] = {"truth": "True", "info": "Helpful"}
"""The word that ends a prompt of TruthfulQA's own judge data, before ` yes` or ` no`."""
TRUTHFULQA_PROMPT = re.compile(r"Q: (.*?)\nA:(.*)\n(\w+):", re.DOTALL)


@dataclass(frozen=True)
class LabeledAnswer:
    """An answer to a question, and whether it is true (or informative)."""

    question: str
    answer: str
    label: bool


def read_labeled_answers(source: str, aspect: Aspect, skip_bad_rows: bool = False) -> list[LabeledAnswer]:
    """The labeled answers of a file.

    A row is `{"question": text, "answer": text, "label": true or false}`, or one of TruthfulQA's own:
    `{"prompt": "Q: ...\\nA: ...\\nTrue:", "completion": " yes"}`.

    Raises:
        UserError: one line, for a bad row, or a file that holds only one of the two labels.
    """
    rows, nothing = iter_rows(source), f"{source}: holds no usable answer"
    answers = parse_rows(rows, lambda row, _: [_labeled_answer(row, aspect)], skip_bad_rows, nothing)
    if len({answer.label for answer in answers}) < 2:
        raise UserError(
            f"{source}: a judge needs answers of both labels to learn from; these {len(answers)} rows all have the same"
        )
    return answers


def _labeled_answer(row: Mapping[str, Any], aspect: Aspect) -> LabeledAnswer:
    if row.get("prompt") is None:
        label = required_field(row, "label", "write true or false")
        if not isinstance(label, bool):
            raise field_error("label", f"is {label!r}", "write true or false")
        question = check_text(required_field(row, "question", "write the question"), "question")
        answer = check_text(required_field(row, "answer", "write the answer"), "answer", may_be_empty=True)
        return LabeledAnswer(question.strip(), answer.strip(), label)
    parts = TRUTHFULQA_PROMPT.fullmatch(check_text(row["prompt"], "prompt"))
    if parts is None or parts[3] != ASPECT_WORDS[aspect]:
        problem = f"is not 'Q: ...', 'A: ...', '{ASPECT_WORDS[aspect]}:'"
        raise field_error("prompt", problem, f"use a file for the judge of {aspect}")
    completion = str(required_field(row, "completion", "write ' yes' or ' no'")).strip()
    if completion not in ("yes", "no"):
        raise field_error("completion", f"is {completion!r}", "write ' yes' or ' no'")
    return LabeledAnswer(parts[1].strip(), parts[2].strip(), completion == "yes")


def split_by_question(
    rows: Sequence[LabeledAnswer], share: float, seed: int
) -> tuple[list[LabeledAnswer], list[LabeledAnswer]]:
    """Training rows and held-out rows with no question in common, so that a judge cannot have memorized an answer.

    Args:
        rows: all labeled answers.
        share: share of the questions to hold out; at least one is.
        seed: seed of the random order.

    Raises:
        UserError: if there is only one question.
    """
    questions = sorted({row.question for row in rows})
    if len(questions) < 2:
        raise UserError("the judge's data has only one question; give at least two, so that some can be held out")
    order = generator(seed, Stream.JUDGE_SPLIT).permutation(len(questions))
    count = min(len(questions) - 1, max(1, round(share * len(questions))))
    held_out = {questions[number] for number in order[:count]}
    return [row for row in rows if row.question not in held_out], [row for row in rows if row.question in held_out]
