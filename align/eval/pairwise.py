"""Pairwise comparisons of answers to the same prompt, and win rates computed from them.

An outcome is 1 if the first model won, 0 if the second did, 0.5 for a tie. The length-controlled win rate is a logistic
regression with Firth's penalty (1993): half the log-determinant of the information matrix, the logarithm of Jeffreys'
prior. The estimate is finite even if a feature separates wins from losses. Profile likelihood intervals remain valid in
that case (Heinze and Schemper 2002); intervals from standard errors or resampling do not.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, xlog1py, xlogy

from align.core.statistics import LEVEL, design_effect, share_interval
from align.eval.results import Measurement
from align.eval.store import Json


@dataclass(frozen=True)
class PairwiseComparison:
    """Two models' answers to one prompt, and the outcome.

    Attributes:
        item: the prompt. Comparisons of the same item are not independent.
        lengths: lengths of both answers in characters.
        flipped: whether the judge's verdict changed with the order of the answers. If so, the outcome is a tie.
        index: row index of the prompt in its file, from 0; used to look up its difficulty. None if unknown.
    """

    item: str
    first: str
    second: str
    outcome: float
    lengths: tuple[int, int]
    flipped: bool = False
    index: int | None = None

    def outcome_for(self, model: str) -> float:
        """Return the outcome for `model`: 1 if it won."""
        return self.outcome if model == self.first else 1.0 - self.outcome

    def extra_length_of(self, model: str) -> int:
        """Return the length of `model`'s answer minus the length of the other answer, in characters."""
        longer = self.lengths[0] - self.lengths[1]
        return longer if model == self.first else -longer

    def reference_length(self, model: str, baseline: str) -> int:
        """Return the length of the baseline's answer in characters. Without a baseline, return the length of the answer
        that is not `model`'s.
        """
        by_model = {self.first: self.lengths[0], self.second: self.lengths[1]}
        return by_model.get(baseline, self.lengths[model == self.first])


def outcome_of_rewards(first: float, second: float) -> float:
    """Return the outcome of a comparison in which the higher reward wins."""
    return 0.5 + 0.5 * ((first > second) - (first < second))


def item_numbers(comparisons: Sequence[PairwiseComparison]) -> np.ndarray:
    """Return the item number [N] of each comparison, from 0."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(comparison.item, len(numbers)) for comparison in comparisons])


def win_rate(comparisons: Sequence[PairwiseComparison], model: str) -> tuple[float, float, float]:
    """Return the win rate of `model`, counting ties as half, with an interval clustered by item."""
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons])
    return float(outcomes.mean()), *share_interval(outcomes, item_numbers(comparisons))


def pair_table(comparisons: Sequence[PairwiseComparison], models: Sequence[str]) -> list[Json]:
    """Return one row per compared pair of models: wins, ties and losses of the first model."""
    rows = []
    for first, second in combinations(models, 2):
        of_pair = [each for each in comparisons if {each.first, each.second} == {first, second}]
        if of_pair:
            signs = Counter(np.sign(comparison.outcome_for(first) - 0.5) for comparison in of_pair)
            row: Json = {"model": first, "against": second, "won": signs[1], "tied": signs[0], "lost": signs[-1]}
            ends = zip(("win rate", "low", "high"), win_rate(of_pair, first), strict=True)
            rows.append(row | {name: round(value, 4) for name, value in ends})
    return rows


NAME = "win rate, length-controlled"
MIN_PROMPTS = 30
"""Minimum number of prompts to fit three coefficients."""
THIN_OVERLAP = 0.05
"""Minimum fraction of comparisons on each side of equal length. Below it, the estimate is an extrapolation."""


def length_controlled_measurement(
    comparisons: Sequence[PairwiseComparison], model: str, scorer: str, baseline: str = ""
) -> Measurement:
    """Estimate the win rate that `model` would have if both answers were equally long.

    Fit a logistic regression of the outcome on tanh(d / sd(d)), where d is the length difference, and on tanh(z), where z is
    the standardized length of the baseline's answer. The win rate is the prediction at d = 0 and the mean of tanh(z).
    The first term is from AlpacaEval 2 (Dubois et al. 2024, "Length-Controlled AlpacaEval", section 3). The second
    replaces AlpacaEval's per-prompt difficulty, which requires a leaderboard: prompts with short answers are harder for
    the baseline, and without the second term the first one absorbs this effect.
    There is no value for fewer than `MIN_PROMPTS` prompts or if d = 0 is outside the data.

    Args:
        baseline: model whose answers define z. In comparisons without it, and by default, the other model's answers do.
    """
    count, items = len(comparisons), item_numbers(comparisons)
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons], dtype=np.float64)
    extra_length = np.array([comparison.extra_length_of(model) for comparison in comparisons], dtype=np.float64)
    value: tuple[float | None, float | None, float | None] = (None, None, None)
    if items.max() + 1 < MIN_PROMPTS:
        note = f"needs {MIN_PROMPTS} prompts or more"
    elif not extra_length.any():
        value, note = win_rate(comparisons, model), "all answers have equal length, so this is the win rate"
    elif (extra_length > 0).all() or (extra_length < 0).all():
        side = "longer" if extra_length[0] > 0 else "shorter"
        note = f"every answer is {side}, so the win rate at equal length cannot be estimated"
    else:
        features = [np.tanh(extra_length / extra_length.std(ddof=1))]
        reference = np.array([comparison.reference_length(model, baseline) for comparison in comparisons], dtype=np.float64)
        if reference.std() > 0:
            control = np.tanh((reference - reference.mean()) / reference.std())
            features.append(control - control.mean())
        intercept, low, high = estimate_intercept(np.column_stack(features), outcomes, design_effect(outcomes, items))
        value = float(expit(intercept)), float(expit(low)), float(expit(high))
        note = "predicted at equal length"
        overlap = min((extra_length <= 0).mean(), (extra_length >= 0).mean())
        if overlap < THIN_OVERLAP:
            note += f"; {overlap:.1%} of the answers are on the other side of equal length: use the interval, not the value"
    return Measurement(NAME, *value, count, scorer, note, "" if value[0] is None else "higher")


def estimate_intercept(features: np.ndarray, outcomes: np.ndarray, effect: float) -> tuple[float, float, float]:
    """Fit logit P = intercept + features x weights. Return the intercept with its penalized profile likelihood interval.

    Args:
        features: [N, F]; no column may be constant.
        outcomes: [N], from 0 to 1; a tie is one half.
        effect: number of rows per independent observation, at least 1.
    """
    from scipy.stats import chi2  # slow to import

    value = fit(features, outcomes, np.ones(len(outcomes)))[0]
    weights = np.full(len(outcomes), 1 / max(1.0, effect))
    best = fit(features, outcomes, weights)
    least = penalized_log_likelihood(best, features, outcomes, weights) - float(chi2.ppf(LEVEL, 1)) / 2

    def lead(intercept: float) -> float:
        """Return the penalized log-likelihood at this intercept, relative to its value at the ends of the interval."""
        line = fit(features, outcomes, weights, intercept, start=best)
        return penalized_log_likelihood(line, features, outcomes, weights) - least

    low, high = _end(lead, best[0], -1.0), _end(lead, best[0], 1.0)
    return value, min(low, value), max(high, value)


MAX_STEP = 5.0
"""Maximum change of a coefficient per Newton step (log-odds), as in R's logistf."""


def fit(
    features: np.ndarray,
    outcomes: np.ndarray,
    weights: np.ndarray,
    intercept: float | None = None,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Maximize `penalized_log_likelihood` with Newton steps on Firth's score. Return intercept and slopes.

    Args:
        features: [N, F], or [N] of one feature.
        weights: [N] number of observations that each row represents.
        intercept: fixed intercept. If None, the intercept is fitted.
        start: initial coefficients. Default: 0.
    """
    design = np.column_stack([np.ones(len(outcomes)), features])
    line = np.zeros(design.shape[1]) if start is None else np.array(start, dtype=np.float64)
    free = slice(0 if intercept is None else 1, None)
    if intercept is not None:
        line[0] = intercept
    value = penalized_log_likelihood(line, features, outcomes, weights)
    for _ in range(200):
        probability = expit(design @ line)
        variance = weights * probability * (1 - probability)
        information = design.T @ (variance[:, None] * design)
        leverage = variance * np.einsum("nf,fn->n", design, np.linalg.solve(information, design.T))
        score = design.T @ (weights * (outcomes - probability) + leverage * (0.5 - probability))
        step = np.linalg.solve(information[free, free], score[free])
        step *= min(1.0, MAX_STEP / max(np.abs(step).max(), 1e-12))
        while True:  # halve the step until the likelihood does not decrease
            trial = line.copy()
            trial[free] += step
            trial_value = penalized_log_likelihood(trial, features, outcomes, weights)
            if trial_value >= value or np.abs(step).max() < 1e-10:
                break
            step /= 2
        line, value = trial, trial_value
        if np.abs(step).max() < 1e-8:
            break
    return line


def penalized_log_likelihood(
    line: Sequence[float] | np.ndarray, features: np.ndarray, outcomes: np.ndarray, weights: np.ndarray
) -> float:
    """Return the log-likelihood of the outcomes plus half the log-determinant of the information matrix.

    Args:
        line: intercept and slopes.
        features: [N, F], or [N] of one feature.
    """
    design = np.column_stack([np.ones(len(outcomes)), features])
    probability = expit(design @ np.asarray(line))
    fitted = weights * (xlogy(outcomes, probability) + xlog1py(1 - outcomes, -probability))
    variance = weights * probability * (1 - probability)
    sign, log_determinant = np.linalg.slogdet(design.T @ (variance[:, None] * design))
    return float(fitted.sum() + 0.5 * log_determinant) if sign > 0 else -math.inf


def _end(lead: Callable[[float], float], at: float, sign: float) -> float:
    near, far = at, at + sign
    while lead(far) > 0:
        if abs(far) > 60.0:  # log-odds
            return far
        near, far = far, far + 2 * (far - at)
    return float(brentq(lead, near, far, xtol=1e-5, rtol=1e-5))
