"""Judges of truthfulness and informativeness. `align eval train-judge` trains one.

The judge compares the answer with the reference answers to its question. It consists of boosted trees. Their features are
similarities of words and of sentence vectors, and the logit of a logistic regression on the text. It has no factual
knowledge: without references, it only recognizes the usual phrasing of true answers.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
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
from align.eval.answer_features import AnswerFeatures, Encode, JudgedAnswer, SentenceEncoder, answer_features
from align.eval.questions import Question, read_questions

HEAD_FILE, METADATA_FILE = "judge_head.safetensors", "judge.json"
HELD_OUT = 0.2
"""Fraction of questions held out to evaluate a judge."""
PRIOR_VARIANCE = 3.0
"""Variance of a logit under the Gaussian prior on the regression weights (L2 penalty)."""
FOLDS = 3
"""Number of cross-fitting folds: trees are trained on logits of regressions that did not see the question."""
TREES: dict[str, Any] = {
    "max_iter": 200,
    "learning_rate": 0.05,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 40,
    "l2_regularization": 1.0,
    "max_features": 0.5,
    "early_stopping": False,
    "random_state": 0,
}
"""Hyperparameters of scikit-learn's HistGradientBoostingClassifier."""
Weights = Mapping[str, np.ndarray]
"""Tensors of a judge, see `fit_judge`."""
Aspect = Literal["truth", "info"]
"""Aspect that a judge rates: truth or informativeness."""
ASPECT_WORDS: dict[Aspect, str] = {"truth": "True", "info": "Helpful"}
"""Last word of a prompt in TruthfulQA's judge data, before ` yes` or ` no`."""
TRUTHFULQA_PROMPT = re.compile(r"Q: (.*?)\nA:(.*)\n(\w+):", re.DOTALL)


@dataclass(kw_only=True)
class JudgeConfig(Settings):
    """Train a judge of answers."""

    data: str = option(
        "", "Labeled answers: rows with question, answer and label, or TruthfulQA's judge data.", required=True
    )
    questions: str = option(
        "",
        "The same questions with reference answers: TruthfulQA.csv, or JSON Lines with question, best_answer, "
        "correct_answers and incorrect_answers. Without references, the judge is much less accurate.",
    )
    asks: Aspect = option("truth", "What the labels state: truth (the answer is true) or info (the answer is informative).")
    encoder: str = option("minilm-l6", "Sentence encoder: local folder, Hub id or built-in model.")
    skip_bad_rows: bool = option(False, "Skip and count invalid data rows instead of stopping at the first.")
    output_dir: str = option("runs/judge", "Output folder. The judge is saved in its subfolder model.", required=True)


@dataclass(frozen=True)
class LabeledAnswer:
    """An answer to a question, labeled true (or informative) or not."""

    question: str
    answer: str
    label: bool


@dataclass(frozen=True)
class AnswerJudge:
    """A trained judge.

    Attributes:
        weights: see `fit_judge`.
        encoder: name of the sentence encoder.
        uses_references: whether the judge was trained with reference answers.
        name: name in results: aspect, hash of the weights, AUC on held-out questions.
    """

    weights: Weights
    encoder: str
    uses_references: bool
    name: str

    @cached_property
    def _encode(self) -> Encode:
        return SentenceEncoder(self.encoder)

    def probabilities(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        """Return the probability of "yes" for each question and answer."""
        items = [
            JudgedAnswer(question.text, answer, question if self.uses_references else None)
            for question, answer in zip(questions, answers, strict=True)
        ]
        probabilities: list[float] = expit(judge_logits(self.weights, answer_features(items, self._encode))).tolist()
        return probabilities


def run_train_judge(config: JudgeConfig) -> Path:
    """Train and save a judge, and print AUC and calibration on held-out questions. Return its folder."""
    rows = read_labeled_answers(config.data, config.asks, config.skip_bad_rows)
    references = match_references(rows, config.questions, config.skip_bad_rows)
    training, held_out = split_by_question(rows, HELD_OUT, seed=0)
    if len({row.label for row in training}) < 2:
        problem = "all training answers have the same label; add more questions"
        raise UserError(f"{config.data}: {problem}")
    evaluated = [row for row in held_out if not is_reference(row, references)]
    encode = SentenceEncoder(config.encoder)
    weights = fit_judge(features_of(training, references, encode), labels_of(training), [row.question for row in training])
    metrics = {}
    if evaluated:
        metrics = held_out_metrics(judge_logits(weights, features_of(evaluated, references, encode)), evaluated)
    counts = {"learned_from": len(training), "held_out": len(evaluated)}
    folder = Path(config.output_dir) / "model"
    with new_folder(folder) as temporary:
        save_file(dict(weights), temporary / HEAD_FILE)
        write_json(temporary / METADATA_FILE, asdict(config) | counts | {"metrics": metrics})
    texts = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    print(f"judge of {config.asks}, trained on {counted(len(training), 'answer')}; {len(evaluated)} held out: {texts}")
    print(f"saved the judge to {folder}")
    return folder


def match_references(rows: Sequence[LabeledAnswer], source: str, skip_bad_rows: bool = False) -> dict[str, Question]:
    """Return the reference answers of each question by its text. Empty without a source.

    Raises:
        UserError: if no question of the rows is in the file.
    """
    if not source:
        return {}
    known = {question.text: question for question in read_questions(source, skip_bad_rows)}
    questions = {row.question for row in rows}
    if not questions & known.keys():
        raise UserError(f"questions: {source} contains none of the {len(questions)} questions of the labeled answers")
    if missing := sorted(questions - known.keys()):
        print(f"{source}: no reference answers to {counted(len(missing), 'question')}, such as {missing[0]!r}")
    return known


def is_reference(row: LabeledAnswer, references: Mapping[str, Question]) -> bool:
    """Return whether the answer is itself a reference answer, which makes it useless for testing the judge."""
    question = references.get(row.question)
    return question is not None and row.answer in question.answers


def features_of(rows: Sequence[LabeledAnswer], references: Mapping[str, Question], encode: Encode) -> AnswerFeatures:
    """Return the features of labeled answers."""
    items = [JudgedAnswer(row.question, row.answer, references.get(row.question)) for row in rows]
    return answer_features(items, encode)


def labels_of(rows: Sequence[LabeledAnswer]) -> np.ndarray:
    """Return the labels [N] bool."""
    return np.array([row.label for row in rows])


# ------------------------------------------------------------------------------------------------------------ the model


def fit_judge(features: AnswerFeatures, labels: np.ndarray, questions: Sequence[str]) -> dict[str, np.ndarray]:
    """Fit logistic regression on text features, and trees on its logit and the reference agreement features.

    Args:
        labels: [N] bool, of both kinds.
        questions: [N]; the trees are trained on logits of regressions on other questions.

    Returns:
        `text.weight` and `text.bias` of the regression; for T trees of up to M nodes `tree.feature`, `tree.left`,
        `tree.right` and `tree.leaf` [T, M] int32, `tree.threshold` and `tree.value` [T, M] float64; `tree.bias`.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    def regression(rows: np.ndarray) -> LogisticRegression:
        return LogisticRegression(C=PRIOR_VARIANCE, max_iter=200, tol=1e-3).fit(features.text[rows], labels[rows])

    everything = regression(np.arange(len(labels)))
    logits = everything.decision_function(features.text)
    fold = np.unique(questions, return_inverse=True)[1] % FOLDS
    for number in np.unique(fold):
        inside = fold == number
        if len(np.unique(labels[~inside])) == 2:
            logits[inside] = regression(np.flatnonzero(~inside)).decision_function(features.text[inside])
    boosted = HistGradientBoostingClassifier(**TREES).fit(_tree_inputs(features, logits), labels)
    # scikit-learn's public API saves these trees only with pickle. A test compares both logits.
    trees = [predictor.nodes for (predictor,) in boosted._predictors]

    def column(name: str, dtype: type) -> np.ndarray:
        values: np.ndarray = np.zeros((len(trees), max(map(len, trees))), dtype)
        for row, nodes in enumerate(trees):
            values[row, : len(nodes)] = nodes[name]
        return values

    return {
        "text.weight": everything.coef_[0].astype(np.float32),
        "text.bias": everything.intercept_.astype(np.float32),
        "tree.feature": column("feature_idx", np.int32),
        "tree.left": column("left", np.int32),
        "tree.right": column("right", np.int32),
        "tree.leaf": column("is_leaf", np.int32),
        "tree.threshold": column("num_threshold", np.float64),
        "tree.value": column("value", np.float64),
        "tree.bias": np.asarray(boosted._baseline_prediction, dtype=np.float64).reshape(1),
    }


def judge_logits(weights: Weights, features: AnswerFeatures) -> np.ndarray:
    """Return the logits of "yes" [N]."""
    text = features.text @ weights["text.weight"].astype(np.float64) + weights["text.bias"].astype(np.float64)
    inputs = _tree_inputs(features, text)
    trees, rows = np.arange(len(weights["tree.feature"])), np.arange(len(inputs))[:, None]
    nodes = np.zeros((len(inputs), len(trees)), dtype=np.int64)
    while not (is_leaf := weights["tree.leaf"][trees, nodes].astype(bool)).all():
        goes_left = inputs[rows, weights["tree.feature"][trees, nodes]] <= weights["tree.threshold"][trees, nodes]
        children = np.where(goes_left, weights["tree.left"][trees, nodes], weights["tree.right"][trees, nodes])
        nodes = np.where(is_leaf, nodes, children)
    logits: np.ndarray = weights["tree.value"][trees, nodes].sum(1) + weights["tree.bias"]
    return logits


def _tree_inputs(features: AnswerFeatures, logits: np.ndarray) -> np.ndarray:
    return np.column_stack([features.agreement, logits]).astype(np.float32)  # dtype used by scikit-learn's trees


# ------------------------------------------------------------------------------------------------------ files of judges

TREE_TENSORS = ("feature", "left", "right", "leaf", "threshold", "value", "bias")
TENSORS = {"text.weight", "text.bias", *(f"tree.{name}" for name in TREE_TENSORS)}


def load_judge(folder: str, aspect: Aspect) -> AnswerJudge:
    """Load a judge. Raise a `UserError` if it is missing, invalid or of the other aspect."""
    path = Path(folder)
    if not (path / METADATA_FILE).exists():
        raise UserError(f"{folder}: not a judge ({METADATA_FILE} is missing); train one with `align eval train-judge`")
    metadata = read_json(path / METADATA_FILE)
    if metadata.get("asks") != aspect:
        raise UserError(f"{folder}: this judge was trained for {metadata.get('asks')}, not {aspect}")
    try:
        weights, metrics = load_file(path / HEAD_FILE), metadata["metrics"]
        encoder, uses_references = metadata["encoder"], bool(metadata["questions"])
        if weights.keys() != TENSORS:
            raise KeyError(f"tensors {', '.join(sorted(weights))}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"{folder}: invalid {HEAD_FILE} or {METADATA_FILE} ({reason}); train the judge again") from error
    version = hashlib.sha256((path / HEAD_FILE).read_bytes()).hexdigest()[:12]
    quality = f"held-out AUC {metrics['auc']:.2f}" if "auc" in metrics else "not evaluated"
    return AnswerJudge(weights, encoder, uses_references, f"{aspect} judge {version} ({quality})")


def read_labeled_answers(source: str, aspect: Aspect, skip_bad_rows: bool = False) -> list[LabeledAnswer]:
    """Read labeled answers from a file. Both labels must occur.

    A row is `{"question": text, "answer": text, "label": true or false}`, or a row in TruthfulQA's format:
    `{"prompt": "Q: ...\\nA: ...\\nTrue:", "completion": " yes"}`.
    """
    parse = partial(_labeled_answers, aspect=aspect)
    answers = parse_rows([source], parse, "no usable answers", skip_bad_rows=skip_bad_rows)
    if len({answer.label for answer in answers}) < 2:
        problem = f"all {len(answers)} rows have the same label"
        raise UserError(f"{source}: a judge needs answers with both labels; {problem}")
    return answers


def _labeled_answers(row: Mapping[str, Any], _number: str, aspect: Aspect) -> list[LabeledAnswer]:
    if row.get("prompt") is None:
        label = required_field(row, "label", "use true or false")
        if not isinstance(label, bool):
            raise field_error("label", f"is {label!r}", "use true or false")
        question = check_text(required_field(row, "question", "write the question"), "question")
        answer = check_text(required_field(row, "answer", "write the answer"), "answer", may_be_empty=True)
        return [LabeledAnswer(question.strip(), answer.strip(), label)]
    parts = TRUTHFULQA_PROMPT.fullmatch(check_text(row["prompt"], "prompt"))
    if parts is None or parts[3] != ASPECT_WORDS[aspect]:
        problem = f"is not 'Q: ...', 'A: ...', '{ASPECT_WORDS[aspect]}:'"
        raise field_error("prompt", problem, f"use a file for the judge of {aspect}")
    completion = str(required_field(row, "completion", "use ' yes' or ' no'")).strip()
    if completion not in ("yes", "no"):
        raise field_error("completion", f"is {completion!r}", "use ' yes' or ' no'")
    return [LabeledAnswer(parts[1].strip(), parts[2].strip(), completion == "yes")]


def split_by_question(
    rows: Sequence[LabeledAnswer], share: float, seed: int
) -> tuple[list[LabeledAnswer], list[LabeledAnswer]]:
    """Split rows into training and held-out rows without common questions."""
    questions = sorted({row.question for row in rows})
    if len(questions) < 2:
        raise UserError("the data contains only one question; a judge needs at least two, because some are held out")
    order = generator(seed, RngStream.JUDGE_SPLIT).permutation(len(questions))
    count = min(len(questions) - 1, max(1, round(share * len(questions))))
    held_out = {questions[number] for number in order[:count]}
    return [row for row in rows if row.question not in held_out], [row for row in rows if row.question in held_out]


# ------------------------------------------------------------------------------------------------------------- metrics


def held_out_metrics(logits: np.ndarray, rows: Sequence[LabeledAnswer]) -> dict[str, float]:
    """Return AUC, accuracy and calibration error of a judge's logits [N]."""
    labels = np.array([row.label for row in rows])
    metrics = {"auc": roc_auc(logits, labels), "accuracy": float(((logits > 0) == labels).mean())}
    return metrics | {"calibration_error": calibration_error(expit(logits), labels)}


if __name__ == "__main__":
    run_stage(JudgeConfig, run_train_judge)
