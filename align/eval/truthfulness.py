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
from align.eval.judged_answers import Asks
from align.eval.results import Evaluation, Figure, Json, Rows, publish
from align.eval.settings import EvalConfig, spread
from align.eval.subjects import Subject, fingerprint, open_accelerator, subjects
from align.eval.truth_judge import Judge, load_judge
from align.eval.truthful_data import Question, read_questions
from align.eval.truthful_generation import judged_figures, overlap_figures, require_scorers, share, write_answers
from align.eval.truthful_prompts import Asking, PromptStyle, require_template
from align.eval.truthful_scoring import Choices, answer_log_likelihoods, multiple_choice
from align.generation import Sampling

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
    generation: bool = option(False, "let the model write answers, for judges and for BLEU and ROUGE")
    max_new_tokens: int = option(50, "longest written answer, in tokens (TruthfulQA's code: 50)")
    temperature: float = option(0.0, "of written answers; 0 takes the likeliest token, as TruthfulQA does")
    truth_judge: str = option("", "folder of a judge of truth from `align eval train-judge`; empty: none")
    info_judge: str = option("", "folder of a judge of informativeness; empty: none")
    overlap: bool = option(True, "compare written answers with the given ones by BLEU and ROUGE (needs the extra eval)")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "limit", self.limit >= 0, "0 or more")
        require(self, "multiple_choice", self.multiple_choice or self.generation, "true, unless generation is")
        require(self, "generation", self.generation or not (self.truth_judge or self.info_judge), "true for a judge")
        require(self, "max_new_tokens", self.max_new_tokens > 0, "above 0")
        require(self, "temperature", self.temperature >= 0, "0 or more")

    def kept_under(self, *names: str) -> Json:
        """The settings that decide the rows of one part: those that both share, and `names`."""
        shared = ("seed", "dtype", "chat_template", "questions", "prompt", "primer", "chat")
        files = {f"{name}_sha256": fingerprint(getattr(self, name)) for name in ("questions", "primer")}
        return {name: getattr(self, name) for name in (*shared, *names)} | files


def run_truthfulness(config: TruthfulnessConfig) -> list[Evaluation]:
    """Evaluate each model; writes `truthfulness.json` and files of rows for each model, and prints the table.

    Raises:
        UserError: for anything that the settings, the questions or a model have wrong; what was computed is kept.
    """
    if config.generation and config.overlap:
        require_scorers()
    questions = spread(read_questions(config.questions, config.skip_bad_rows), config.limit)
    asking = Asking.of(config.prompt, config.primer, config.chat)
    accelerator = open_accelerator(config)
    folders: dict[Asks, str] = {"truth": config.truth_judge, "info": config.info_judge}
    judges = {asks: load_judge(folder, asks, accelerator) for asks, folder in folders.items() if folder}
    found = [_evaluate(config, each, questions, asking, judges, accelerator) for each in subjects(config, accelerator)]
    return publish(config, found, accelerator)


def _evaluate(
    config: TruthfulnessConfig,
    subject: Subject,
    questions: list[Question],
    asking: Asking,
    judges: dict[Asks, Judge],
    accelerator: Accelerator,
) -> Evaluation:
    """Both parts for one model; `settings` of the result are all that decide a figure."""
    if config.chat:
        require_template(subject.loaded.tokenization, config.chat_template, subject.source)
    by_id = {question.id: question for question in questions}
    model = {"model": subject.source, "weights": subject.fingerprint}
    figures: list[Figure] = []
    tables: dict[str, list[Json]] = {}

    def rows(part: str, *names: str) -> Rows:
        path = Path(config.output) / f"{TASK}-{part}-{subject.name}.jsonl"
        return Rows(path, config.kept_under(*names) | model, accelerator)

    if config.multiple_choice:
        found = rows("choice", "convention").fill(
            by_id, lambda part: score_choices(config, subject, part, asking, accelerator), label=f"{subject.name}: choice"
        )
        figures, tables["Multiple choice by category"] = choice_figures(config, questions, found)
    if config.generation:
        sampling = Sampling(config.max_new_tokens, config.temperature, batch_tokens=config.batch_tokens)
        written = rows("answers", "max_new_tokens", "temperature").fill(
            by_id,
            lambda part: write_answers(subject, part, asking, sampling, config.seed, accelerator),
            label=f"{subject.name}: answers",
        )
        texts = [row["text"] for row in written]
        said, verdicts = judged_figures(judges, questions, texts, config.resamples, config.batch_tokens, accelerator)
        figures += said
        if config.overlap:
            figures += overlap_figures(questions, texts, config.resamples)
        tables["Answers"] = [
            {"question": question.text, "answer": text, **verdict}
            for question, text, verdict in zip(questions, texts, verdicts or [{}] * len(texts), strict=True)
        ]
    names = ("convention", "max_new_tokens", "temperature", "limit", "truth_judge", "info_judge")
    settings = config.kept_under(*names) | model | {f"{asks} judge": judge.name for asks, judge in judges.items()}
    return Evaluation(TASK, subject.name, settings, figures, tables)


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
        share(name, values[name], config.resamples, "log-likelihood", f"{note}{sum(guessed) / len(guessed):.3f}")
        for name, guessed in chance.items()
    ]
    table = []
    for category in sorted({question.category for question in questions}):
        of = [number for number, question in enumerate(questions) if question.category == category]
        means = {name: share(name, [found[i] for i in of], config.resamples, "").text for name, found in values.items()}
        table.append({"category": category, "n": len(of), **means})
    return figures, table


if __name__ == "__main__":
    run_stage(TruthfulnessConfig, run_truthfulness)
