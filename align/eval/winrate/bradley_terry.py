"""Strengths of several models from pairwise comparisons (Bradley and Terry 1952)."""

from collections.abc import Sequence

import numpy as np

from align.eval.core.results import Figure
from align.eval.winrate.pairwise import PairwiseComparison, item_numbers
from align.eval.winrate.penalized_logistic import fit, profile_interval
from align.statistics import design_effect

NAME = "Bradley-Terry strength"
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
        return {model: Figure(NAME, None, None, None, counts[model], scorer, note) for model in models}
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
        figures[model] = Figure(NAME, value, min(low, value), max(high, value), len(won), scorer, note, "higher")
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
