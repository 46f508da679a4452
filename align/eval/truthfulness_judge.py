"""A judge of answers: is this answer to this question true (or informative)? `align eval train-judge` trains one.

The judge is a logistic regression on the words and word pairs of the answer. They show how true answers are usually
phrased, but hold no facts.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from scipy.special import expit

from align.core.errors import UserError, counted, first_line
from align.core.files import new_folder, read_json, write_json
from align.core.launch import run_stage
from align.core.seeds import RngStream, generator
from align.core.settings import Settings, option
from align.core.statistics import calibration_error, roc_auc
from align.data.fields import check_text, field_error, required_field
from align.data.readers import parse_rows

HEAD_FILE, METADATA_FILE = "judge_head.safetensors", "judge.json"
BUCKETS = 1 << 16
"""Number of buckets that words and word pairs are hashed into."""
HELD_OUT = 0.2
"""Share of the questions that is held out to evaluate a judge."""
PRIOR_VARIANCE = 5.0
"""Variance of a logit under the Gaussian prior of the weights: the L2 penalty. It was chosen on held-out questions."""
Aspect = Literal["truth", "info"]
"""The question that a judge decides: whether an answer is true, or whether it is informative."""
ASPECT_WORDS: dict[Aspect, str] = {"truth": "True", "info": "Helpful"}
"""The word that ends a prompt of TruthfulQA's own judge data, before ` yes` or ` no`."""
TRUTHFULQA_PROMPT = re.compile(r"Q: (.*?)\nA:(.*)\n(\w+):", re.DOTALL)


@dataclass(kw_only=True)
class JudgeConfig(Settings):
    """A judge of answers."""

    data: str = option(
        "", "labeled answers: rows with question, answer, label, or TruthfulQA's own judge data", required=True
    )
    asks: Aspect = option("truth", "meaning of the labels: truth (the answer is true) or info (it is informative)")
    skip_bad_rows: bool = option(False, "leave out rows that cannot be read instead of stopping at the first")
    output_dir: str = option("runs/judge", "folder whose subfolder model holds the judge", required=True)


@dataclass(frozen=True)
class LabeledAnswer:
    """An answer to a question, and whether it is true (or informative)."""

    question: str
    answer: str
    label: bool


@dataclass(frozen=True)
class AnswerJudge:
    """A logistic regression with weights [BUCKETS], and its name in results: aspect, hash, AUC on held-out questions."""

    weight: np.ndarray
    bias: float
    name: str

    def probabilities(self, answers: Sequence[str]) -> list[float]:
        """The probability of "yes" for each answer."""
        probabilities: list[float] = expit(word_features(answers) @ self.weight + self.bias).tolist()
        return probabilities


def run_train_judge(config: JudgeConfig) -> Path:
    """Train a judge, save it, and print AUC and calibration on held-out questions; returns its folder."""
    from sklearn.linear_model import LogisticRegression

    rows = read_labeled_answers(config.data, config.asks, config.skip_bad_rows)
    training, held_out = split_by_question(rows, HELD_OUT, seed=0)
    if len({row.label for row in training}) < 2:
        problem = "without the held-out questions, all answers have the same label; give more questions"
        raise UserError(f"{config.data}: {problem}")
    model = LogisticRegression(C=PRIOR_VARIANCE, max_iter=1000)
    model.fit(word_features([row.answer for row in training]), [row.label for row in training])
    weight, bias = model.coef_[0], float(model.intercept_[0])
    metrics = held_out_metrics(word_features([row.answer for row in held_out]) @ weight + bias, held_out)
    counts = {"learned_from": len(training), "held_out": len(held_out)}
    tensors = {"weight": np.asarray(weight, np.float32), "bias": np.array(bias, np.float32)}
    folder = Path(config.output_dir) / "model"
    with new_folder(folder) as temporary:
        save_file(tensors, temporary / HEAD_FILE)
        write_json(temporary / METADATA_FILE, asdict(config) | counts | {"metrics": metrics})
    texts = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    print(f"judge of {config.asks}, trained on {counted(len(training), 'answer')}; {len(held_out)} held out: {texts}")
    print(f"the judge is in {folder}")
    return folder


def word_features(answers: Sequence[str]) -> Any:
    """Words and pairs of neighboring words, with marks for beginning and end, hashed; each row has norm 1."""
    from sklearn.feature_extraction.text import HashingVectorizer

    words = HashingVectorizer(
        n_features=BUCKETS, ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", alternate_sign=False, binary=True
    )
    return words.transform([f"< {answer} >" for answer in answers])


# ------------------------------------------------------------------------------------------------------ files of judges


def load_judge(folder: str, aspect: Aspect) -> AnswerJudge:
    """Load a judge; raises a `UserError` for a folder without one, a broken one, or one of the other aspect."""
    path = Path(folder)
    if not (path / METADATA_FILE).exists():
        raise UserError(f"{folder}: not a judge ({METADATA_FILE} is missing); train one with `align eval train-judge`")
    metadata = read_json(path / METADATA_FILE)
    if metadata.get("asks") != aspect:
        raise UserError(f"{folder}: this judge was trained for {metadata.get('asks')}, not for {aspect}")
    try:
        tensors, auc = load_file(path / HEAD_FILE), metadata["metrics"]["auc"]
        weight, bias = tensors["weight"].astype(np.float64), float(tensors["bias"])
        if weight.shape != (BUCKETS,):
            raise KeyError(f"weight is {weight.shape}, not {BUCKETS}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"{folder}: its {HEAD_FILE} or {METADATA_FILE} is broken ({reason}); train it again") from error
    version = hashlib.sha256((path / HEAD_FILE).read_bytes()).hexdigest()[:12]
    return AnswerJudge(weight, bias, f"{aspect} judge {version} (held-out AUC {auc:.2f})")


def read_labeled_answers(source: str, aspect: Aspect, skip_bad_rows: bool = False) -> list[LabeledAnswer]:
    """The labeled answers of a file, with both labels.

    A row is `{"question": text, "answer": text, "label": true or false}`, or one of TruthfulQA's own:
    `{"prompt": "Q: ...\\nA: ...\\nTrue:", "completion": " yes"}`.
    """
    parse = partial(_labeled_answers, aspect=aspect)
    answers = parse_rows([source], parse, "holds no usable answer", skip_bad_rows=skip_bad_rows)
    if len({answer.label for answer in answers}) < 2:
        problem = f"these {len(answers)} rows all have the same"
        raise UserError(f"{source}: a judge needs answers of both labels to learn from; {problem}")
    return answers


def _labeled_answers(row: Mapping[str, Any], _number: str, aspect: Aspect) -> list[LabeledAnswer]:
    if row.get("prompt") is None:
        label = required_field(row, "label", "write true or false")
        if not isinstance(label, bool):
            raise field_error("label", f"is {label!r}", "write true or false")
        question = check_text(required_field(row, "question", "write the question"), "question")
        answer = check_text(required_field(row, "answer", "write the answer"), "answer", may_be_empty=True)
        return [LabeledAnswer(question.strip(), answer.strip(), label)]
    parts = TRUTHFULQA_PROMPT.fullmatch(check_text(row["prompt"], "prompt"))
    if parts is None or parts[3] != ASPECT_WORDS[aspect]:
        problem = f"is not 'Q: ...', 'A: ...', '{ASPECT_WORDS[aspect]}:'"
        raise field_error("prompt", problem, f"use a file for the judge of {aspect}")
    completion = str(required_field(row, "completion", "write ' yes' or ' no'")).strip()
    if completion not in ("yes", "no"):
        raise field_error("completion", f"is {completion!r}", "write ' yes' or ' no'")
    return [LabeledAnswer(parts[1].strip(), parts[2].strip(), completion == "yes")]


def split_by_question(
    rows: Sequence[LabeledAnswer], share: float, seed: int
) -> tuple[list[LabeledAnswer], list[LabeledAnswer]]:
    """Training rows and held-out rows, of a share of the questions, with no question in common."""
    questions = sorted({row.question for row in rows})
    if len(questions) < 2:
        raise UserError("the judge's data has only one question; give at least two: some are held out")
    order = generator(seed, RngStream.JUDGE_SPLIT).permutation(len(questions))
    count = min(len(questions) - 1, max(1, round(share * len(questions))))
    held_out = {questions[number] for number in order[:count]}
    return [row for row in rows if row.question not in held_out], [row for row in rows if row.question in held_out]


# ------------------------------------------------------------------------------------------------------------- metrics


def held_out_metrics(logits: np.ndarray, rows: Sequence[LabeledAnswer]) -> dict[str, float]:
    """Quality of a judge's logits [N]: AUC, accuracy, calibration error."""
    labels = np.array([row.label for row in rows])
    metrics = {"auc": roc_auc(logits, labels), "accuracy": float(((logits > 0) == labels).mean())}
    return metrics | {"calibration_error": calibration_error(expit(logits), labels)}


if __name__ == "__main__":
    run_stage(JudgeConfig, run_train_judge)
