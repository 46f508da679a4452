"""AlpacaEval 2's length-controlled win rate, for prompts of known difficulty.

Dubois et al. 2024, "Length-Controlled AlpacaEval" (arXiv 2404.04475). One logistic regression for each model, without an
intercept: `logit P(model wins) = a tanh(delta / s) + b difficulty + c`, where delta is the length of the baseline's answer
minus the model's, in characters, and s is its standard deviation. The rate is the mean of the predictions at delta = 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import expit, logit

from align.core.errors import UserError
from align.core.statistics import LEVEL
from align.data.fields import field_error, required_field
from align.data.readers import parse_rows
from align.eval.pairwise import MIN_PROMPTS, NAME, PairwiseComparison
from align.eval.results import Measurement

ANCHOR_WEIGHT = 0.1
"""Weight of an anchor row relative to a comparison. AlpacaEval divides 0.2 by its two altered baselines."""
PENALTIES = np.logspace(-4, 4, 10)
"""Candidates for scikit-learn's C, the inverse of the L1 penalty."""
FOLDS = 5
LARGEST_LOGIT = 1e3
"""Upper bound of values in difficulty and anchor files. Larger values indicate errors."""


@dataclass(frozen=True)
class Anchors:
    """Comparisons of the baseline with longer and shorter versions of its answers, of equal quality.

    Attributes:
        index: [M] prompt index of each row, or -1.
        features: [M, 3] tanh(delta / s), the prompt's difficulty, and 0, because model quality has no effect here.
        preference: [M] probability that the altered answer wins.
    """

    index: np.ndarray
    features: np.ndarray
    preference: np.ndarray


@dataclass(frozen=True)
class PromptDifficulty:
    """Difficulty of each prompt (log-odds that the baseline loses) by index, and anchors.

    Attributes:
        by_position: look up each model's n-th comparison at index n, as the published leaderboard does. It shifts the
            difficulty of all prompts after a missing one.
    """

    difficulty: Mapping[int, float]
    anchors: Anchors | None = None
    by_position: bool = False

    def of(self, comparisons: Sequence[PairwiseComparison]) -> np.ndarray:
        """Return the difficulty of each comparison's prompt: [N].

        Raises:
            UserError: if a comparison has no index, or an index has no difficulty.
        """
        difficulties = []
        for position, comparison in enumerate(comparisons):
            index = position if self.by_position else comparison.index
            if index is None:
                remedy = "add a field 'index' to each row, or set difficulty_by to position"
                raise UserError(f"difficulty: a comparison of '{comparison.second}' has no index; {remedy}")
            if index not in self.difficulty:
                remedy = "add the row or remove the comparison"
                raise UserError(f"difficulty: no row with index {index}; {remedy}")
            difficulties.append(self.difficulty[index])
        return np.array(difficulties, dtype=np.float64)


def read_difficulty(difficulty: str, anchors: str = "", by_position: bool = False) -> PromptDifficulty:
    """Read the difficulty (rows of `index`, `instruction_difficulty`) and, if a path is given, the anchors.

    Anchors are rows of `preference` (0 to 1), `std_delta_len` (delta / s), `instruction_difficulty` and optionally `index`.
    """
    nothing = "no rows; each row needs the fields index and instruction_difficulty"
    pairs = parse_rows([difficulty], _difficulty_of_row, nothing)
    by_index = dict(pairs)
    if len(by_index) < len(pairs):
        raise UserError(f"{difficulty}: duplicate index; keep one row per prompt")
    return PromptDifficulty(by_index, _read_anchors(anchors) if anchors else None, by_position)


def _difficulty_of_row(row: Mapping[str, Any], _number: str) -> list[tuple[int, float]]:
    return [(int(read_number(row, "index", low=0, whole=True)), read_number(row, "instruction_difficulty"))]


def _read_anchors(path: str) -> Anchors:
    nothing = "no rows; each row needs preference, std_delta_len and instruction_difficulty"
    rows = np.array(parse_rows([path], _anchor_of_row, nothing))
    features = np.column_stack([np.tanh(rows[:, 2]), rows[:, 3], np.zeros(len(rows))])
    return Anchors(rows[:, 0].astype(int), features, rows[:, 1])


def _anchor_of_row(row: Mapping[str, Any], _number: str) -> list[tuple[float, float, float, float]]:
    index = -1.0 if row.get("index") is None else read_number(row, "index", low=0, whole=True)
    values = read_number(row, "std_delta_len"), read_number(row, "instruction_difficulty")
    return [(index, read_number(row, "preference", low=0, high=1), *values)]


def read_number(
    row: Mapping[str, Any], name: str, low: float = -LARGEST_LOGIT, high: float = float("inf"), whole: bool = False
) -> float:
    """Parse the number in a field, which is a string in CSV files. Raise a `UserError` that names the field if it is
    invalid.
    """
    value = required_field(row, name, "add a number")
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not low <= number <= high or number == float("inf") or (whole and number % 1):
        bounds = f"from {low:g}" + ("" if high == float("inf") else f" to {high:g}")
        raise field_error(name, f"is {value!r}", f"use a {'whole ' if whole else ''}number {bounds}")
    return number


@dataclass
class _Rows:
    """Regression rows: features [N, 3], preference [N], weight [N] and prompt [N]."""

    features: np.ndarray
    preference: np.ndarray
    weight: np.ndarray
    prompt: np.ndarray = field(repr=False)


def difficulty_controlled_measurement(
    comparisons: Sequence[PairwiseComparison], model: str, baseline: str, scorer: str, control: PromptDifficulty
) -> Measurement:
    """Estimate the win rate of `model` against `baseline` at equal answer length.

    The interval contains the uncertainty of the three weights and of the choice of prompts (clustered sandwich estimator,
    on the log-odds). AlpacaEval's `lc_standard_error` is smaller: it measures only the spread of predictions over prompts.
    """
    pairs = [comparison for comparison in comparisons if {comparison.first, comparison.second} == {model, baseline}]
    if model == baseline or len({comparison.item for comparison in pairs}) < MIN_PROMPTS:
        note = "baseline of the other win rates" if model == baseline else f"needs {MIN_PROMPTS} prompts"
        return Measurement(NAME, None, None, None, len(pairs), scorer, note)
    rows = _regression_rows(pairs, model, control)
    weights = fit_l1(rows, choose_penalty(rows))
    rate, low, high = _rate_with_interval(rows, weights, len(pairs))
    note = f"predicted at equal length given the difficulty of each prompt, against {baseline}"
    return Measurement(NAME, rate, low, high, len(pairs), scorer, note, "higher")


def _regression_rows(pairs: Sequence[PairwiseComparison], model: str, control: PromptDifficulty) -> _Rows:
    delta = np.array([-pair.extra_length_of(model) for pair in pairs], dtype=np.float64)
    spread = delta.std(ddof=1)
    features = np.column_stack([np.tanh(delta / spread) if spread else 0 * delta, control.of(pairs), np.ones(len(pairs))])
    preference = np.array([pair.outcome_for(model) for pair in pairs], dtype=np.float64)
    number: dict[object, int] = {}
    prompt = np.array([number.setdefault(pair.item if pair.index is None else pair.index, len(number)) for pair in pairs])
    if control.anchors is None:
        return _Rows(features, preference, np.ones(len(pairs)), prompt)
    anchors = control.anchors
    known = [number.get(index, len(number) + row) for row, index in enumerate(anchors.index.tolist())]
    weight = np.append(np.ones(len(pairs)), np.full(len(known), ANCHOR_WEIGHT))
    preference = np.append(preference, anchors.preference)
    return _Rows(np.vstack([features, anchors.features]), preference, weight, np.append(prompt, known))


def fit_l1(rows: _Rows, penalty: float) -> np.ndarray:
    """Minimize |a| + |b| + |c| + C x the weighted log loss, with liblinear as in AlpacaEval: [3]."""
    from sklearn.linear_model import LogisticRegression  # slow to import

    # The target y is a probability: each row is a win with weight w y and a loss with weight w (1 - y).
    won, lost = rows.weight * rows.preference, rows.weight * (1 - rows.preference)
    targets, doubled = np.repeat([1, 0], len(won)), np.vstack([rows.features, rows.features])
    model = LogisticRegression(
        C=penalty, l1_ratio=1, solver="liblinear", fit_intercept=False, tol=1e-4, random_state=123, max_iter=1000
    )
    return np.asarray(model.fit(doubled, targets, sample_weight=np.append(won, lost)).coef_[0])


def choose_penalty(rows: _Rows) -> float:
    """Select the C of `PENALTIES` with the lowest cross-validated log loss, the smaller one if tied."""
    from sklearn.model_selection import GroupKFold  # slow to import

    losses = np.zeros(len(PENALTIES))
    for train, test in GroupKFold(FOLDS).split(rows.features, groups=np.arange(len(rows.weight))):
        fitted = _Rows(*(column[train] for column in (rows.features, rows.preference, rows.weight, rows.prompt)))
        for number, penalty in enumerate(PENALTIES):
            odds = rows.features[test] @ fit_l1(fitted, penalty)
            loss = np.logaddexp(0, odds) - rows.preference[test] * odds
            losses[number] += (rows.weight[test] * loss).mean() / FOLDS
    return float(PENALTIES[losses.argmin()])


def _rate_with_interval(rows: _Rows, weights: np.ndarray, count: int) -> tuple[float, float, float]:
    """Return the mean prediction at delta = 0 over the first `count` rows, with an interval from each prompt's influence."""
    from scipy.stats import norm  # slow to import

    level = rows.features[:count] * [0, 1, 1]
    predicted = expit(level @ weights)
    rate = float(predicted.mean())
    probability = expit(rows.features @ weights)
    variance = rows.weight * probability * (1 - probability)
    information = rows.features.T @ (variance[:, None] * rows.features)
    score = rows.features * (rows.weight * (rows.preference - probability))[:, None]
    gradient = (predicted * (1 - predicted)) @ level / count
    influence = score @ np.linalg.pinv(information) @ gradient
    influence[:count] += (predicted - rate) / count
    error = float(np.sqrt((np.bincount(rows.prompt, influence) ** 2).sum())) / (rate * (1 - rate))
    half = float(norm.ppf((1 + LEVEL) / 2)) * error
    return rate, float(expit(logit(rate) - half)), float(expit(logit(rate) + half))
