"""Comparisons of two answers to the same prompt, and the win rates that follow from them.

An outcome is 1 if the first model won, 0 if the second did, 0.5 for a tie. The length-controlled win rate is a logistic
regression with Firth's penalty (1993): half the log-determinant of the information matrix, the logarithm of Jeffreys'
prior. The estimate is finite even where a feature separates wins from losses. Intervals by profile likelihood stay right
there (Heinze and Schemper 2002); intervals by standard errors or by resampling do not.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import expit, xlog1py, xlogy

from align.core.statistics import LEVEL, design_effect, share_interval
from align.eval.results import Measurement
from align.eval.store import Json


@dataclass(frozen=True)
class PairwiseComparison:
    """Two models' answers to one prompt, and which is better.

    Attributes:
        item: the prompt; comparisons of one item depend on each other.
        lengths: characters of both answers.
        flipped: whether the judge's verdict changed with the order of the answers; the outcome is then a tie.
    """

    item: str
    first: str
    second: str
    outcome: float
    lengths: tuple[int, int]
    flipped: bool = False

    def outcome_for(self, model: str) -> float:
        """The outcome from the point of view of `model`: 1 if it won."""
        return self.outcome if model == self.first else 1.0 - self.outcome

    def extra_length_of(self, model: str) -> int:
        """By how many characters `model`'s answer is longer than the other one."""
        longer = self.lengths[0] - self.lengths[1]
        return longer if model == self.first else -longer


def outcome_of_rewards(first: float, second: float) -> float:
    """The outcome where the higher number wins."""
    return 0.5 + 0.5 * ((first > second) - (first < second))


def item_numbers(comparisons: Sequence[PairwiseComparison]) -> np.ndarray:
    """The number of each comparison's item, from 0: [N]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(comparison.item, len(numbers)) for comparison in comparisons])


def win_rate(comparisons: Sequence[PairwiseComparison], model: str) -> tuple[float, float, float]:
    """Share of the comparisons that `model` won, ties as half, with its interval, in which an item counts once."""
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons])
    return float(outcomes.mean()), *share_interval(outcomes, item_numbers(comparisons))


def pair_table(comparisons: Sequence[PairwiseComparison], models: Sequence[str]) -> list[Json]:
    """A row for each pair of models that were compared: how often the first won, tied and lost."""
    rows = []
    for first, second in combinations(models, 2):
        of_pair = [each for each in comparisons if {each.first, each.second} == {first, second}]
        if of_pair:
            signs = Counter(np.sign(comparison.outcome_for(first) - 0.5) for comparison in of_pair)
            row: Json = {"model": first, "against": second, "won": signs[1], "tied": signs[0], "lost": signs[-1]}
            ends = zip(("win rate", "low", "high"), win_rate(of_pair, first), strict=True)
            rows.append(row | {name: round(value, 4) for name, value in ends})
    return rows


MIN_PROMPTS = 30
"""Fewest prompts for a fit of two coefficients."""


def length_controlled_measurement(comparisons: Sequence[PairwiseComparison], model: str, scorer: str) -> Measurement:
    """The win rate that `model` would have if both answers were equally long.

    Logistic regression of the outcome on tanh(d / sd(d)), d how much longer the answer is; the win rate is the
    prediction at d = 0. After the length control of AlpacaEval 2 (Dubois et al. 2024, "Length-Controlled AlpacaEval",
    section 3), without its term for the difficulty of each instruction, which needs a whole leaderboard.
    It has no value for fewer than `MIN_PROMPTS` prompts, and where d = 0 is outside the data.
    """
    count, items = len(comparisons), item_numbers(comparisons)
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons], dtype=np.float64)
    extra_length = np.array([comparison.extra_length_of(model) for comparison in comparisons], dtype=np.float64)
    value: tuple[float | None, float | None, float | None] = (None, None, None)
    if items.max() + 1 < MIN_PROMPTS:
        note = f"needs {MIN_PROMPTS} prompts or more"
    elif not extra_length.any():
        value, note = win_rate(comparisons, model), "all answers are equally long: the win rate itself"
    elif (extra_length > 0).all() or (extra_length < 0).all():
        side = "longer" if extra_length[0] > 0 else "shorter"
        note = f"every answer is {side}: nothing shows the rate at equal length"
    else:
        extra = np.tanh(extra_length / extra_length.std())
        intercept, low, high = estimate_intercept(extra, outcomes, design_effect(outcomes, items))
        value = float(expit(intercept)), float(expit(low)), float(expit(high))
        note = "predicted for answers of equal length"
    return Measurement("win rate, length-controlled", *value, count, scorer, note, "" if value[0] is None else "higher")


def estimate_intercept(extra: np.ndarray, outcomes: np.ndarray, effect: float) -> tuple[float, float, float]:
    """The intercept of logit P = intercept + slope x extra, and its interval by penalized profile likelihood.

    Args:
        extra: [N], not all equal.
        outcomes: [N], from 0 to 1; a tie is one half.
        effect: how many rows stand for one independent observation, at least 1.
    """
    from scipy.stats import chi2  # slow to import

    value, _ = fit(extra, outcomes, np.ones(len(outcomes)))
    weights = np.full(len(outcomes), 1 / max(1.0, effect))
    at, steepest = fit(extra, outcomes, weights)
    least = penalized_log_likelihood(at, steepest, extra, outcomes, weights) - float(chi2.ppf(LEVEL, 1)) / 2

    def lead(intercept: float) -> float:
        """How far the highest penalized log-likelihood with this intercept is above that of the interval's ends."""
        found = minimize_scalar(
            lambda slope: -penalized_log_likelihood(intercept, slope, extra, outcomes, weights),
            bracket=(steepest - 1, steepest + 1),
        )
        return -float(found.fun) - least

    low, high = _end(lead, at, -1.0), _end(lead, at, 1.0)
    return value, min(low, value), max(high, value)


def fit(extra: np.ndarray, outcomes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """The intercept and the slope that maximize `penalized_log_likelihood`; a row stands for `weights` [N] observations."""
    found = minimize(
        lambda line: -penalized_log_likelihood(line[0], line[1], extra, outcomes, weights),
        np.zeros(2),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 2000},
    )
    return float(found.x[0]), float(found.x[1])


def penalized_log_likelihood(
    intercept: float, slope: float, extra: np.ndarray, outcomes: np.ndarray, weights: np.ndarray
) -> float:
    """The log-likelihood of the outcomes plus half the log-determinant of the information."""
    probability = expit(intercept + slope * extra)
    fitted = weights * (xlogy(outcomes, probability) + xlog1py(1 - outcomes, -probability))
    variance = weights * probability * (1 - probability)
    determinant = variance.sum() * (variance @ extra**2) - (variance @ extra) ** 2
    return float(fitted.sum() + 0.5 * math.log(determinant)) if determinant > 0 else -math.inf


def _end(lead: Callable[[float], float], at: float, sign: float) -> float:
    near, far = at, at + sign
    while lead(far) > 0:
        if abs(far) > 60.0:  # log-odds
            return far
        near, far = far, far + 2 * (far - at)
    return float(brentq(lead, near, far, xtol=1e-5, rtol=1e-5))
