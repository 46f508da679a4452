"""Logistic fits to comparisons: strengths of models (Bradley and Terry 1952), and the win rate at equal length."""

from collections.abc import Sequence

import numpy as np
from scipy.special import expit

from align.core.statistics import design_effect
from align.eval.core.results import Figure
from align.eval.winrate.pairwise import PairwiseComparison, item_numbers, win_rate
from align.eval.winrate.penalized_logistic import fit, profile_interval

STRENGTH, LENGTH_CONTROLLED = "Bradley-Terry strength", "win rate, length-controlled"
MIN_PROMPTS = 30
"""Fewest prompts for a fit of two coefficients."""
NOTE = "log-odds against the mean model, with Jeffreys' prior"


def strength_figures(comparisons: Sequence[PairwiseComparison], models: Sequence[str], scorer: str) -> dict[str, Figure]:
    """The Bradley-Terry strength of each model: log-odds, with a mean of 0 over the models; a tie is half a win.

    The strengths maximize the likelihood with Jeffreys' prior (`align.eval.winrate.penalized_logistic`), which for two
    models adds half a win to both: a model that never loses gets a finite strength and a wide interval. The comparisons of
    one prompt count as fewer independent ones, by the design effect of the model's outcomes.

    Returns:
        Figures without a value where no chain of comparisons connects all models: their strengths have no common scale.
    """
    groups = connected_groups(comparisons, models)
    counts = {model: sum(model in (each.first, each.second) for each in comparisons) for model in models}
    if len(groups) > 1:
        named = " | ".join(", ".join(group) for group in groups)
        note = f"not comparable: no comparison connects {named}"
        return {model: Figure(STRENGTH, None, None, None, counts[model], scorer, note) for model in models}
    column = {model: number for number, model in enumerate(models)}
    sides = np.array([[column[each.first], column[each.second]] for each in comparisons])
    outcomes, items = np.array([each.outcome for each in comparisons], dtype=np.float64), item_numbers(comparisons)
    basis = np.linalg.svd(np.ones((1, len(models))))[2][1:].T  # [K, K - 1]: strengths = basis @ coefficients, with sum 0
    rows = np.eye(len(models))
    design, outcome, weights = _table(rows, sides, outcomes)
    strengths = basis @ fit(design @ basis, outcome, weights)
    figures = {}
    for model, number in column.items():
        own = (sides == number).any(1)
        won = np.where(sides[own, 0] == number, outcomes[own], 1 - outcomes[own])
        weight = 1 / max(1.0, design_effect(won, items[own]))
        low, high = profile_interval(design @ basis, outcome, weights * weight, basis[number])
        value = float(strengths[number])
        limit = {
            0.0: "; it never won: only the prior limits it from below",
            1.0: "; it never lost: only the prior limits it",
        }
        note = NOTE + limit.get(float(won.mean()), "")
        figures[model] = Figure(STRENGTH, value, min(low, value), max(high, value), len(won), scorer, note, "higher")
    return figures


def _table(rows: np.ndarray, sides: np.ndarray, outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Comparisons summed up by pair: the difference of the models' rows [P, K], the share won [P], the number [P]."""
    flipped = sides[:, 0] > sides[:, 1]
    pairs, place = np.unique(np.sort(sides, axis=1), axis=0, return_inverse=True)
    number = np.bincount(place.ravel()).astype(np.float64)
    won = np.bincount(place.ravel(), np.where(flipped, 1 - outcomes, outcomes))
    return rows[pairs[:, 0]] - rows[pairs[:, 1]], won / number, number


def connected_groups(comparisons: Sequence[PairwiseComparison], models: Sequence[str]) -> list[list[str]]:
    """The models in groups: within a group, a chain of comparisons connects any two."""
    group = {model: {model} for model in models}
    for comparison in comparisons:
        if group[comparison.first] is not group[comparison.second]:
            joined = group[comparison.first] | group[comparison.second]
            group |= dict.fromkeys(joined, joined)
    return [
        [model for model in models if model in members] for members in {id(each): each for each in group.values()}.values()
    ]


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
        return Figure(LENGTH_CONTROLLED, None, None, None, count, scorer, f"needs {MIN_PROMPTS} prompts or more")
    outcomes = np.array([comparison.outcome_for(model) for comparison in comparisons], dtype=np.float64)
    extra_length = np.array([comparison.extra_length_of(model) for comparison in comparisons], dtype=np.float64)
    if not extra_length.any():
        rate = win_rate(comparisons, model)
        return Figure(LENGTH_CONTROLLED, *rate, count, scorer, "all answers are equally long: the win rate itself", "higher")
    if (extra_length > 0).all() or (extra_length < 0).all():
        side = "longer" if extra_length[0] > 0 else "shorter"
        note = f"every answer is {side}: nothing shows the rate at equal length"
        return Figure(LENGTH_CONTROLLED, None, None, None, count, scorer, note)
    design = np.stack([np.ones(count), np.tanh(extra_length / extra_length.std())], axis=1)
    intercept, _ = fit(design, outcomes, np.ones(count))
    weight = 1 / max(1.0, design_effect(outcomes, items))
    low, high = profile_interval(design, outcomes, np.full(count, weight), np.array([1.0, 0.0]))
    value, low, high = (float(expit(end)) for end in (intercept, min(low, intercept), max(high, intercept)))
    return Figure(LENGTH_CONTROLLED, value, low, high, count, scorer, "predicted for answers of equal length", "higher")
