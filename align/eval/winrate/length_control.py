"""The win rate at equal length: a logistic regression removes the effect of answer length."""

from collections.abc import Sequence

import numpy as np
from scipy.special import expit

from align.eval.core.results import Figure
from align.eval.winrate.pairwise import PairwiseComparison, item_numbers, win_rate
from align.eval.winrate.penalized_logistic import fit, profile_interval
from align.statistics import design_effect

NAME = "win rate, length-controlled"
MIN_PROMPTS = 30
"""Fewest prompts for a fit of two coefficients."""


def length_controlled_figure(comparisons: Sequence[PairwiseComparison], model: str, scorer: str) -> Figure:
    """The win rate that `model` would have if both answers were equally long.

    Logistic regression of the outcome on tanh(d / sd(d)), d how much longer the answer is; the win rate is the
    prediction at d = 0. After the length control of AlpacaEval 2 (Dubois et al. 2024, "Length-Controlled AlpacaEval",
    section 3), without its term for the difficulty of each instruction, which needs a whole leaderboard. The fit has
    Firth's penalty, see `align.eval.winrate.penalized_logistic`.

    Returns:
        A figure without a value for fewer than `MIN_PROMPTS` prompts, and where d = 0 is outside the data.
    """
    count, items = len(comparisons), item_numbers(comparisons)
    if items.max() + 1 < MIN_PROMPTS:
        return Figure(NAME, None, None, None, count, scorer, f"needs {MIN_PROMPTS} prompts or more")
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons], dtype=np.float64)
    extra_length = np.array([comparison.extra_length_of(model) for comparison in comparisons], dtype=np.float64)
    if not extra_length.any():
        rate = win_rate(comparisons, model)
        return Figure(NAME, *rate, count, scorer, "all answers are equally long: the win rate itself", "higher")
    if (extra_length > 0).all() or (extra_length < 0).all():
        side = "longer" if extra_length[0] > 0 else "shorter"
        return Figure(
            NAME, None, None, None, count, scorer, f"every answer is {side}: nothing shows the rate at equal length"
        )
    design = np.stack([np.ones(count), np.tanh(extra_length / extra_length.std())], axis=1)
    intercept, _ = fit(design, outcomes, np.ones(count))
    weight = 1 / max(1.0, design_effect(outcomes, items))
    low, high = profile_interval(design, outcomes, np.full(count, weight), np.array([1.0, 0.0]))
    value, low, high = (float(expit(end)) for end in (intercept, min(low, intercept), max(high, intercept)))
    return Figure(NAME, value, low, high, count, scorer, "predicted for answers of equal length", "higher")
