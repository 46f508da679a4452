"""The win rate at equal length: a logistic regression removes the effect of answer length."""

from collections.abc import Sequence

import numpy as np
from scipy.special import expit

from align.eval.winrate.pairwise import PairwiseComparison, item_numbers, resample_counts
from align.statistics import statistic_interval

PRIOR = 0.01
"""Weight of each squared coefficient: an infinite coefficient becomes a large one, others do not change."""


def length_controlled_win_rate(
    comparisons: Sequence[PairwiseComparison], model: str, resamples: int
) -> tuple[float, float, float]:
    """The win rate that `model` would have if both answers were equally long, with its interval.

    Logistic regression of the outcome on tanh(d / sd(d)), d how much longer the answer is; the win rate is the
    prediction at d = 0. After the length control of AlpacaEval 2 (Dubois et al. 2024, "Length-Controlled AlpacaEval",
    section 3), without its term for the difficulty of each instruction, which needs a whole leaderboard.
    """
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons], dtype=np.float64)
    extra_length = np.array([comparison.extra_length_of(model) for comparison in comparisons], dtype=np.float64)
    deviation = extra_length.std()
    length_feature = np.tanh(extra_length / deviation) if deviation > 0 else np.zeros_like(extra_length)
    items = item_numbers(comparisons)
    membership = np.zeros((items.max() + 1, len(comparisons)))
    membership[items, np.arange(len(comparisons))] = 1.0

    def predict_at_equal_length(drawn: np.ndarray) -> np.ndarray:
        weights = resample_counts(drawn, len(membership)) @ membership
        intercepts = fit_logistic(outcomes, length_feature, weights)[:, 0]
        return np.asarray(expit(intercepts))

    low, high = statistic_interval(predict_at_equal_length, len(membership), resamples)
    return float(predict_at_equal_length(np.arange(len(membership))[None])[0]), low, high


def fit_logistic(outcomes: np.ndarray, feature: np.ndarray, weights: np.ndarray, steps: int = 50) -> np.ndarray:
    """Coefficients [R, 2] of logit P = a + b x for R weightings [R, N] of N outcomes in [0, 1], by Newton's method.

    All resamples are fitted at once: scikit-learn's fits are the same to 1e-8, but 2,000 of them take 80 times as long.
    """
    design = np.stack([np.ones_like(feature), feature], axis=1)
    coefficients = np.zeros((len(weights), 2))
    for _ in range(steps):
        probability = expit(coefficients @ design.T)
        gradient = (weights * (outcomes - probability)) @ design - PRIOR * coefficients
        curvature = np.einsum("rn,ni,nj->rij", weights * probability * (1 - probability), design, design)
        step = np.linalg.solve(curvature + PRIOR * np.eye(2), gradient[..., None])[..., 0]
        coefficients += np.clip(step, -2.0, 2.0)  # a full step overshoots where outcomes are all the same
        if np.abs(step).max() < 1e-9:
            break
    return coefficients
