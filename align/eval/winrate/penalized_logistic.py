"""Logistic regression with a finite answer for every table: Firth's penalty, and intervals by profile likelihood.

Where a feature separates wins from losses, or a model never loses, the largest likelihood is at infinity. Firth (1993) adds
half the log-determinant of the information matrix to the log-likelihood, which is the logarithm of Jeffreys' prior. In a
table of counts this adds half an observation to each cell. Heinze and Schemper (2002) show that the intervals by profile
likelihood stay right where the fit separates; intervals by standard errors or by resampling do not.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, xlog1py, xlogy

from align.core.statistics import LEVEL

MAX_STEP = 2.0
"""Longest step of a coefficient, in log-odds."""
FARTHEST = 60.0
"""The search for the end of an interval stops at this log-odds."""


def fit(design: np.ndarray, outcomes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The coefficients [p] of logit P = design @ coefficients that maximize `penalized_log_likelihood`.

    Args:
        design: [N, p], of full column rank.
        outcomes: [N], from 0 to 1; a tie is one half.
        weights: [N], how many observations each row stands for.
    """
    return _maximize(design, outcomes, weights, np.zeros(design.shape[1]), np.eye(design.shape[1]))


def profile_interval(
    design: np.ndarray, outcomes: np.ndarray, weights: np.ndarray, contrast: np.ndarray, level: float = LEVEL
) -> tuple[float, float]:
    """The interval of contrast @ coefficients by penalized profile likelihood; arguments as in `fit`.

    Args:
        contrast: [p], not 0.
    """
    from scipy.stats import chi2

    best = fit(design, outcomes, weights)
    top, at = penalized_log_likelihood(design, outcomes, weights, best), float(contrast @ best)
    length = float(contrast @ contrast)
    free = np.linalg.svd(contrast[None])[2][1:].T  # [p, p - 1], orthogonal to the contrast
    limit = float(chi2.ppf(level, 1)) / 2

    def drop(value: float) -> float:
        """How far the penalized log-likelihood falls below its maximum, minus the limit, at this value of the contrast."""
        start = best + contrast * (value - at) / length
        coefficients = _maximize(design, outcomes, weights, start, free) if free.shape[1] else start
        return top - penalized_log_likelihood(design, outcomes, weights, coefficients) - limit

    return _end(drop, at, -1.0), _end(drop, at, 1.0)


def penalized_log_likelihood(
    design: np.ndarray, outcomes: np.ndarray, weights: np.ndarray, coefficients: np.ndarray
) -> float:
    """The log-likelihood of the outcomes plus half the log-determinant of the information; arguments as in `fit`."""
    probability = expit(design @ coefficients)
    fitted = weights * (xlogy(outcomes, probability) + xlog1py(1 - outcomes, -probability))
    sign, log_determinant = np.linalg.slogdet(_information(design, weights, probability))
    return float(fitted.sum() + 0.5 * log_determinant) if sign > 0 else -math.inf


def _information(design: np.ndarray, weights: np.ndarray, probability: np.ndarray) -> np.ndarray:
    information: np.ndarray = (design * (weights * probability * (1 - probability))[:, None]).T @ design
    return information


def _maximize(
    design: np.ndarray, outcomes: np.ndarray, weights: np.ndarray, start: np.ndarray, directions: np.ndarray
) -> np.ndarray:
    """The maximum of the penalized log-likelihood over start + directions @ steps, by Newton steps that are halved."""
    coefficients, value = start, penalized_log_likelihood(design, outcomes, weights, start)
    for _ in range(100):
        probability = expit(design @ coefficients)
        information = _information(design, weights, probability)
        variance = weights * probability * (1 - probability)
        leverage = variance * np.einsum("ni,ij,nj->n", design, np.linalg.pinv(information), design)
        score = design.T @ (weights * (outcomes - probability) + leverage * (0.5 - probability))
        curvature = directions.T @ information @ directions
        step = directions @ np.linalg.lstsq(curvature, directions.T @ score, rcond=None)[0]
        step *= min(1.0, MAX_STEP / max(float(np.abs(step).max()), 1e-300))
        while np.abs(step).max() > 1e-9:
            moved = penalized_log_likelihood(design, outcomes, weights, coefficients + step)
            if moved >= value:
                break
            step = step / 2
        else:
            return coefficients
        coefficients, value = coefficients + step, moved
    return coefficients


def _end(drop: Callable[[float], float], at: float, sign: float) -> float:
    """Where `drop` crosses 0 on one side of its minimum."""
    near, far = at, at + sign
    while drop(far) < 0:
        if abs(far) > FARTHEST:
            return far
        near, far = far, far + 2 * (far - at)
    return float(brentq(drop, near, far, xtol=1e-5, rtol=1e-5))
