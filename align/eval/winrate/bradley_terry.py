"""Strengths of several models from pairwise comparisons (Bradley and Terry 1952)."""

from collections.abc import Sequence

import numpy as np

from align.eval.winrate.pairwise import PairwiseComparison, item_numbers, resample_counts
from align.statistics import percentiles, resample

MAX_STRENGTH = 10.0
"""Strengths end at +-10 (odds of 22,026 to 1): a model that wins every comparison has no finite one."""


def fit_bradley_terry(wins: np.ndarray, steps: int = 10_000) -> np.ndarray:
    """Strengths [R, K] of K models from R tables of wins [R, K, K]: log-odds, with a mean of 0.

    `wins[r, i, j]` counts how often i beat j, a tie as half for both. The minorization-maximization of Hunter (2004),
    "MM algorithms for generalized Bradley-Terry models", for all tables at once.
    """
    models = wins.shape[-1]
    games, won = wins + wins.swapaxes(-1, -2), wins.sum(-1)
    strength = np.zeros(won.shape)
    for _ in range(steps):
        power = np.exp(strength)
        expected = (games / (power[..., :, None] + power[..., None, :])).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            new = np.where(expected > 0, np.log(won) - np.log(expected), 0.0)
        new = np.clip(np.nan_to_num(new, neginf=-MAX_STRENGTH), -MAX_STRENGTH, MAX_STRENGTH)
        new -= new.sum(-1, keepdims=True) / models
        moved = np.abs(new - strength).max()
        strength = np.clip(new, -MAX_STRENGTH, MAX_STRENGTH)
        if moved < 1e-10:
            break
    return strength


def strengths(
    comparisons: Sequence[PairwiseComparison], models: Sequence[str], resamples: int
) -> dict[str, tuple[float, float, float]]:
    """The Bradley-Terry strength of each model with its interval over items."""
    column = {model: number for number, model in enumerate(models)}
    items = item_numbers(comparisons)
    wins = np.zeros((items.max() + 1, len(models), len(models)))
    for comparison, item in zip(comparisons, items, strict=True):
        i, j = column[comparison.first], column[comparison.second]
        wins[item, i, j] += comparison.outcome
        wins[item, j, i] += 1.0 - comparison.outcome
    flat = wins.reshape(len(wins), -1)

    def fit_resamples(drawn: np.ndarray) -> np.ndarray:
        tables = resample_counts(drawn, len(flat)) @ flat
        return fit_bradley_terry(tables.reshape(-1, len(models), len(models)), steps=1000)

    values = fit_bradley_terry(wins.sum(0)[None])[0]
    low, high = percentiles(resample(fit_resamples, len(flat), resamples))
    return {model: (float(values[i]), float(low[i]), float(high[i])) for model, i in column.items()}
