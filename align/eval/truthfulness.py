"""`align eval truthfulness`: TruthfulQA by multiple choice, and by generated answers that judges rate."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from align.core.launch import run_stage
from align.core.seeds import RngStream
from align.core.settings import option, require_setting
from align.eval.answers import EvaluatedModel, TokenPrompt, open_accelerator, open_models, sample_once
from align.eval.results import Evaluation, Measurement, publish, share_measurement
from align.eval.settings import EvalConfig, subsample
from align.eval.store import Json, compute_once
from align.eval.truthfulness_judge import AnswerJudge, Aspect, load_judge
from align.eval.truthfulness_questions import (
    PromptStyle,
    Question,
    QuestionFormat,
    answer_log_likelihoods,
    multiple_choice,
    read_questions,
    require_template,
)
from align.sampling.generation import SamplingParams
from align.tokenization.encoded import PromptResponses

TASK = "truthfulness"
VERDICT_NAMES: dict[Aspect, str] = {"truth": "true", "info": "informative"}
"""The name of a judge's measurement."""


@dataclass(kw_only=True)
class TruthfulnessConfig(EvalConfig):
    """TruthfulQA, or your questions in its format."""

    questions: str = option(
        "data/truthfulness.jsonl",
        "TruthfulQA.csv, or JSON Lines with question, best_answer, correct_answers, incorrect_answers",
    )
    limit: int = option(0, "maximum number of questions, evenly spaced over the file; 0: all", ge=0)
    prompt: PromptStyle = option(
        "qa",
        "text before a question: qa (the examples), instruction (InstructGPT's), instruction_qa (both), question (none)",
    )
    few_shot: str = option("data/truthfulqa_few_shot.jsonl", "file of few-shot examples; the default is TruthfulQA's")
    chat: bool = option(
        False, "use the model's chat template, with the examples as earlier turns; otherwise lines Q: and A:"
    )
    generation: bool = option(False, "also sample answers, for judges")
    max_new_tokens: int = option(50, "longest written answer, in tokens (TruthfulQA's code: 50)", gt=0)
    temperature: float = option(0.0, "sampling temperature of written answers; 0 is greedy, as in TruthfulQA", ge=0)
    truth_judge: str = option("", "folder of a judge of truth from `align eval train-judge`; empty: none")
    info_judge: str = option("", "folder of a judge of informativeness; empty: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "generation", self.generation or not (self.truth_judge or self.info_judge), "true for a judge")


def run_truthfulness(config: TruthfulnessConfig) -> list[Evaluation]:
    """Evaluate each model; writes `truthfulness.json` and files of results for each model, and prints the table."""
    questions = subsample(read_questions(config.questions, config.skip_bad_rows), config.limit)
    question_format = QuestionFormat.from_settings(config.prompt, config.few_shot, config.chat)
    accelerator = open_accelerator(config)
    folders: dict[Aspect, str] = {"truth": config.truth_judge, "info": config.info_judge}
    judges = {aspect: load_judge(folder, aspect, accelerator) for aspect, folder in folders.items() if folder}
    evaluations = []
    for evaluated in open_models(config, accelerator):
        if config.chat:
            require_template(evaluated.loaded.tokenization, config.chat_template, evaluated.source)
        rows = choice_rows(config, evaluated, questions, question_format)
        measurements, by_category = choice_measurements(config, questions, rows)
        tables = {"Multiple choice by category": by_category}
        if config.generation:
            texts = written_answers(config, evaluated, questions, question_format)
            judged, tables["Answers"] = judged_measurements(judges, questions, texts, config.batch_tokens, accelerator)
            measurements += judged
        settings = config.result_settings() | evaluated.settings
        settings |= {f"{aspect} judge": judge.name for aspect, judge in judges.items()}
        evaluations.append(Evaluation(TASK, evaluated.name, settings, measurements, tables))
    return publish(config, evaluations, accelerator)


# ------------------------------------------------------------------------------------------------------ multiple choice


def choice_rows(
    config: TruthfulnessConfig, evaluated: EvaluatedModel, questions: Sequence[Question], question_format: QuestionFormat
) -> list[Json]:
    """Stored log-likelihoods of the answers to each question."""

    def content(question: Question) -> list[object]:
        prompt, _ = question_format.tokens(evaluated.loaded.tokenization, question.text)
        return [prompt, question.best, question.correct, question.incorrect]

    return compute_once(
        Path(config.output) / f"{TASK}-choice-{evaluated.name}.jsonl",
        {"dtype": config.dtype, "chat": config.chat} | evaluated.settings,
        {question.id: question for question in questions},
        lambda chunk: score_choices(config, evaluated, chunk, question_format),
        evaluated.accelerator,
        content=content,
    )


def score_choices(
    config: TruthfulnessConfig, evaluated: EvaluatedModel, questions: Sequence[Question], question_format: QuestionFormat
) -> list[Json]:
    """For each question the log-likelihoods of its best, correct and incorrect answers.

    Raises:
        UserError: if a question with its longest answer does not fit the model.
    """
    backbone, tokenization = evaluated.loaded.backbone, evaluated.loaded.tokenization
    choices = []
    for question in questions:
        prompt, answers = question_format.tokens(tokenization, question.text, question.answers)
        backbone.require_fit(len(prompt), max(map(len, answers)), f"{config.questions}: question {question.id}")
        choices.append(PromptResponses(prompt, answers))
    log_likelihoods = answer_log_likelihoods(backbone, choices, config.batch_tokens, evaluated.accelerator)
    rows: list[Json] = []
    for question, values in zip(questions, log_likelihoods, strict=True):
        found = dict(zip(question.answers, values, strict=True))
        correct, incorrect = ([found[answer] for answer in part] for part in (question.correct, question.incorrect))
        rows.append({"best": found[question.best], "correct": correct, "incorrect": incorrect})
    return rows


def choice_measurements(
    config: TruthfulnessConfig, questions: Sequence[Question], rows: Sequence[Json]
) -> tuple[list[Measurement], list[Json]]:
    """MC1, MC2 and MC3 over all questions, and a table of them by category."""
    scores = [multiple_choice(row["best"], row["correct"], row["incorrect"])._asdict() for row in rows]
    by_guessing = [
        {"mc1": 1 / (1 + wrong), "mc2": right / (right + wrong), "mc3": 1 / (1 + wrong)}
        for right, wrong in ((len(question.correct), len(question.incorrect)) for question in questions)
    ]
    measurements = []
    for name in scores[0]:
        guessed = sum(each[name] for each in by_guessing) / len(questions)
        note = f"prompt {config.prompt}{' in chat' if config.chat else ''}; guessing gives {guessed:.3f}"
        values = [score[name] for score in scores]
        measurements.append(share_measurement(name, values, "log-likelihood", note, better="higher"))
    table = []
    for category in sorted({question.category for question in questions}):
        members = [score for question, score in zip(questions, scores, strict=True) if question.category == category]
        means = {name: share_measurement(name, [score[name] for score in members]).text for name in scores[0]}
        table.append({"category": category, "n": len(members), **means})
    return measurements, table


# ------------------------------------------------------------------------------------------------------ written answers


def written_answers(
    config: TruthfulnessConfig, evaluated: EvaluatedModel, questions: Sequence[Question], question_format: QuestionFormat
) -> list[str]:
    """The stored answer that the model wrote to each question."""
    prompts = {}
    for question in questions:
        ids, _ = question_format.tokens(evaluated.loaded.tokenization, question.text)
        key, where = (zlib.crc32(question.id.encode()),), f"{config.questions}: question {question.id}"
        prompts[question.id] = TokenPrompt(ids, key, where)
    sampling = SamplingParams(config.max_new_tokens, config.temperature, batch_tokens=config.batch_tokens)
    path, stream = Path(config.output) / f"{TASK}-answers-{evaluated.name}.jsonl", RngStream.TRUTHFUL_ANSWERS
    rows = sample_once(path, evaluated, prompts, 1, sampling, config.seed, stream).values()
    texts = [str(row["texts"][0]) for row in rows]
    return texts if config.chat else [first_answer(text) for text in texts]


def first_answer(text: str) -> str:
    """A plain continuation up to where the model starts another question or paragraph."""
    for end in ("\n\n", "\nQ:", "Q:"):
        text = text.split(end, 1)[0]
    return text.strip()


def judged_measurements(
    judges: dict[Aspect, AnswerJudge],
    questions: Sequence[Question],
    answers: Sequence[str],
    budget: int,
    accelerator: Accelerator,
) -> tuple[list[Measurement], list[Json]]:
    """Shares of answers that the judges rate true, informative and both; and each answer with its probabilities."""
    pairs = [(question.text, answer) for question, answer in zip(questions, answers, strict=True)]
    rows: list[Json] = [{"question": question, "answer": answer} for question, answer in pairs]
    measurements, verdicts = [], []
    for aspect, judge in judges.items():
        name, probabilities = VERDICT_NAMES[aspect], judge.probabilities(pairs, budget, accelerator)
        rows = [row | {name: probability} for row, probability in zip(rows, probabilities, strict=True)]
        verdicts.append([probability >= 0.5 for probability in probabilities])
        measurements.append(share_measurement(name, verdicts[-1], judge.name, better="higher"))
    if len(judges) == 2:
        both = [all(pair) for pair in zip(*verdicts, strict=True)]
        scorers = "; ".join(judge.name for judge in judges.values())
        measurements.append(share_measurement("true and informative", both, scorers, better="higher"))
    return measurements, rows


if __name__ == "__main__":
    run_stage(TruthfulnessConfig, run_truthfulness)
