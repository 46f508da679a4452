"""`align eval truthfulness`: TruthfulQA by multiple choice, and by answers that the model writes and judges read.

From a launcher: `accelerate launch align/eval/truthfulness.py --config configs/eval/truthfulness.yaml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accelerate import Accelerator

from align.cli import run_stage
from align.config import option, require
from align.eval.intervals import mean_interval
from align.eval.results import Evaluation, Figure, Json, Rows, publish
from align.eval.settings import EvalConfig, spread
from align.eval.subjects import Subject, open_accelerator, subjects
from align.eval.truthful_data import Question, read_questions
from align.eval.truthful_prompts import Asking, PromptStyle, require_template
from align.eval.truthful_scoring import Choices, answer_log_likelihoods, multiple_choice

Convention = Literal["lm-eval", "original"]
TASK = "truthfulness"


@dataclass(kw_only=True)
class TruthfulnessConfig(EvalConfig):
    """TruthfulQA, or questions of one's own in its form."""

    questions: str = option(
        "data/truthfulness.jsonl",
        "TruthfulQA.csv, or JSON Lines with question, best_answer, correct_answers, incorrect_answers",
    )
    limit: int = option(0, "take only so many questions, evenly spread over the file; 0: all")
    convention: Convention = option(
        "lm-eval",
        "how multiple choice treats answers: lm-eval (text as it stands in the file, a tie wins MC1) or original "
        "(a full stop added, a tie loses), as TruthfulQA's own code does",
    )
    prompt: PromptStyle = option(
        "qa",
        "what precedes a question: qa (the primer), instruction (InstructGPT's), instruction_qa (both), question (none)",
    )
    primer: str = option(
        "data/truthfulqa_primer.jsonl", "file of the primer's questions and answers; the default is TruthfulQA's"
    )
    chat: bool = option(False, "ask through the model's chat template, the primer as earlier turns; else as lines Q: and A:")
    multiple_choice: bool = option(True, "compare log-likelihoods of given answers: MC1, MC2, MC3")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "limit", self.limit >= 0, "0 or more")
        require(self, "multiple_choice", self.multiple_choice, "true: nothing else is asked for")


def run_truthfulness(config: TruthfulnessConfig) -> list[Evaluation]:
    """Evaluate each model; writes `truthfulness.json` and a file of rows for each model, and prints the table.

    Raises:
        UserError: for anything that the settings, the questions or a model have wrong; what was computed is kept.
    """
    questions = spread(read_questions(config.questions, config.skip_bad_rows), config.limit)
    asking = Asking.of(config.prompt, config.primer, config.chat)
    accelerator = open_accelerator(config)
    found = [_evaluate(config, subject, questions, asking, accelerator) for subject in subjects(config, accelerator)]
    return publish(config, found, accelerator)


def _evaluate(
    config: TruthfulnessConfig, subject: Subject, questions: list[Question], asking: Asking, accelerator: Accelerator
) -> Evaluation:
    if config.chat:
        require_template(subject.loaded.tokenization, config.chat_template, subject.source)
    settings: Json = {**config.deciding("limit", "multiple_choice"), "model": subject.fingerprint or subject.source}
    rows = Rows(Path(config.output) / f"{TASK}-choice-{subject.name}.jsonl", settings, accelerator)
    found = rows.fill(
        {question.id: question for question in questions},
        lambda part: score_choices(config, subject, part, asking, accelerator),
        label=f"{subject.name}: multiple choice",
    )
    figures, table = choice_figures(config, questions, found)
    return Evaluation(TASK, subject.name, settings, figures, {"Multiple choice by category": table})


def score_choices(
    config: TruthfulnessConfig, subject: Subject, questions: Sequence[Question], asking: Asking, accelerator: Accelerator
) -> list[Json]:
    """For each question the log-likelihoods of its best, correct and incorrect answers.

    Raises:
        UserError: if a question with its longest answer does not fit the model.
    """
    asked = [question.closed() if config.convention == "original" else question for question in questions]
    backbone, tokenization = subject.loaded.backbone, subject.loaded.tokenization
    choices = []
    for question in asked:
        prompt, answers = asking.tokens(tokenization, question.text, question.answers)
        backbone.require_fit(len(prompt), max(map(len, answers)), f"{config.questions}: question {question.id}")
        choices.append(Choices(prompt, answers))
    results = answer_log_likelihoods(backbone, choices, config.batch_tokens, accelerator)
    rows: list[Json] = []
    for question, sums in zip(asked, results, strict=True):
        by_text = dict(zip(question.answers, sums, strict=True))
        kinds = {"correct": question.correct, "incorrect": question.incorrect}
        rows.append({"best": by_text[question.best]} | {kind: [by_text[text] for text in kinds[kind]] for kind in kinds})
    return rows


def choice_figures(
    config: TruthfulnessConfig, questions: Sequence[Question], rows: Sequence[Json]
) -> tuple[list[Figure], list[Json]]:
    """MC1, MC2 and MC3 over all questions, and a table of them by category."""
    scores = [multiple_choice(row["best"], row["correct"], row["incorrect"], config.convention == "lm-eval") for row in rows]
    note = f"convention {config.convention}, prompt {config.prompt}{' in chat' if config.chat else ''}; guessing gives "
    chance = {
        "mc1": [1 / (1 + len(question.incorrect)) for question in questions],
        "mc2": [len(q.correct) / (len(q.correct) + len(q.incorrect)) for q in questions],
        "mc3": [1 / (1 + len(question.incorrect)) for question in questions],
    }
    values = {name: [getattr(score, name) for score in scores] for name in chance}
    figures = [
        _mean(name, values[name], config.resamples, f"{note}{sum(guessed) / len(guessed):.3f}")
        for name, guessed in chance.items()
    ]
    table = []
    for category in sorted({question.category for question in questions}):
        of = [number for number, question in enumerate(questions) if question.category == category]
        means = {name: _mean(name, [found[i] for i in of], config.resamples).text for name, found in values.items()}
        table.append({"category": category, "n": len(of), **means})
    return figures, table


def _mean(name: str, values: Sequence[float], resamples: int, note: str = "") -> Figure:
    """A mean with its interval; one item alone has none."""
    low, high = mean_interval(values, resamples) if len(values) > 1 else (None, None)
    return Figure(name, sum(values) / len(values), low, high, len(values), note=note)


if __name__ == "__main__":
    run_stage(TruthfulnessConfig, run_truthfulness)
