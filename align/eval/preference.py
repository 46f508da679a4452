"""Win rates from comparisons of two answers to a prompt: plain, at equal length, and as strengths of many models.

numpy alone. A battle's outcome is 1 where the first model won, 0 where the second did, 0.5 for a tie.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from align.eval.intervals import mean_interval, percentiles, resample, statistic_interval
from align.eval.results import Figure, Json

LIMIT = 10.0
"""Strengths end at +-10 (odds of 22,026 to 1): a model that wins every battle has no finite one."""
PRIOR = 0.01
"""Weight of the square of each coefficient of the length model: an infinite one becomes large, others do not change."""


@dataclass(frozen=True)
class Battle:
    """One comparison.

    Attributes:
        item: the prompt; battles of one item are drawn together.
        lengths: characters of both answers.
        flipped: whether the judge named the other one when both swapped places; the outcome is then a tie.
    """

    item: str
    first: str
    second: str
    outcome: float
    lengths: tuple[int, int]
    flipped: bool = False

    def seen_from(self, model: str) -> tuple[float, int]:
        """The outcome for `model`, and by how many characters its answer is longer."""
        longer = self.lengths[0] - self.lengths[1]
        return (self.outcome, longer) if model == self.first else (1.0 - self.outcome, -longer)


def between(battles: Sequence[Battle], first: str, second: str) -> list[Battle]:
    """The battles of two models, whichever came first in them."""
    return [battle for battle in battles if {battle.first, battle.second} == {first, second}]


def groups_of(battles: Sequence[Battle]) -> np.ndarray:
    """The number of each battle's item, from 0."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(battle.item, len(numbers)) for battle in battles])


def win_rate(battles: Sequence[Battle], model: str, resamples: int) -> tuple[float, float, float]:
    """Share of the battles that `model` won, ties as half, with its interval over items."""
    outcomes = np.array([battle.seen_from(model)[0] for battle in battles])
    return float(outcomes.mean()), *mean_interval(outcomes, resamples, groups_of(battles).tolist())


def length_controlled(battles: Sequence[Battle], model: str, resamples: int) -> tuple[float, float, float]:
    """The win rate that `model` would have if both answers were equally long, with its interval.

    Logistic regression of the outcome on tanh(d / sd(d)), d how much longer the answer is; the win rate is the
    prediction at d = 0. After the length control of AlpacaEval 2 (Dubois et al. 2024, "Length-Controlled AlpacaEval",
    section 3), without its term for the difficulty of each instruction, which needs a whole leaderboard.
    """
    seen = [battle.seen_from(model) for battle in battles]
    outcomes, longer = (np.array(column, dtype=np.float64) for column in zip(*seen, strict=True))
    spread = longer.std()
    bent = np.tanh(longer / spread) if spread > 0 else np.zeros_like(longer)
    group = groups_of(battles)
    members = np.zeros((group.max() + 1, len(battles)))
    members[group, np.arange(len(battles))] = 1.0

    def of(drawn: np.ndarray) -> np.ndarray:
        weights = counts(drawn, len(members)) @ members
        return 1.0 / (1.0 + np.exp(-logistic(outcomes, bent, weights)[:, 0]))

    low, high = statistic_interval(of, len(members), resamples)
    return float(of(np.arange(len(members))[None])[0]), low, high


def counts(drawn: np.ndarray, items: int) -> np.ndarray:
    """How often each item is among the drawn ones: [R, items] from numbers [R, n]."""
    return np.stack([np.bincount(row, minlength=items) for row in drawn]).astype(np.float64)


def logistic(outcomes: np.ndarray, feature: np.ndarray, weights: np.ndarray, steps: int = 50) -> np.ndarray:
    """Coefficients [R, 2] of logit P = a + b x for R weightings [R, N] of N outcomes in [0, 1], by Newton's method."""
    design = np.stack([np.ones_like(feature), feature], axis=1)
    found = np.zeros((len(weights), 2))
    for _ in range(steps):
        chance = 1.0 / (1.0 + np.exp(-np.clip(found @ design.T, -30, 30)))
        gradient = (weights * (outcomes - chance)) @ design - PRIOR * found
        curvature = np.einsum("rn,ni,nj->rij", weights * chance * (1 - chance), design, design) + PRIOR * np.eye(2)
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        found += np.clip(step, -2.0, 2.0)  # a full step overshoots where outcomes are all the same
        if np.abs(step).max() < 1e-9:
            break
    return found


def bradley_terry(wins: np.ndarray, steps: int = 10_000) -> np.ndarray:
    """Strengths [R, K] of K models from R tables of wins [R, K, K]: log-odds, with a mean of 0.

    `wins[r, i, j]` counts how often i beat j, a tie as half for both. The minorisation-maximisation of Hunter (2004),
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
        new = np.clip(np.nan_to_num(new, neginf=-LIMIT), -LIMIT, LIMIT)
        new -= new.sum(-1, keepdims=True) / models
        moved = np.abs(new - strength).max()
        strength = np.clip(new, -LIMIT, LIMIT)
        if moved < 1e-10:
            break
    return strength


def strengths(battles: Sequence[Battle], models: Sequence[str], resamples: int) -> dict[str, tuple[float, float, float]]:
    """The Bradley-Terry strength of each model with its interval over items."""
    group, place = groups_of(battles), {model: number for number, model in enumerate(models)}
    wins = np.zeros((group.max() + 1, len(models), len(models)))
    for battle, item in zip(battles, group, strict=True):
        i, j = place[battle.first], place[battle.second]
        wins[item, i, j] += battle.outcome
        wins[item, j, i] += 1.0 - battle.outcome
    flat = wins.reshape(len(wins), -1)

    def of(drawn: np.ndarray) -> np.ndarray:
        tables = counts(drawn, len(flat)) @ flat
        return bradley_terry(tables.reshape(-1, len(models), len(models)), steps=1000)

    values = bradley_terry(wins.sum(0)[None])[0]
    low, high = percentiles(resample(of, len(flat), resamples))
    return {model: (float(values[i]), float(low[i]), float(high[i])) for model, i in place.items()}


def figures(battles: Sequence[Battle], model: str, resamples: int, scorer: str) -> list[Figure]:
    """What one model's battles say of it, against all others together."""
    mine = [battle for battle in battles if model in (battle.first, battle.second)]
    if not mine:
        return [Figure("win rate", None, None, None, 0, scorer, "no comparison names this model")]
    ties = sum(battle.outcome == 0.5 for battle in mine) / len(mine)
    found = [Figure("win rate", *win_rate(mine, model, resamples), len(mine), scorer, "a tie counts as half")]
    note = "predicted for answers of equal length"
    controlled = length_controlled(mine, model, resamples)
    found.append(Figure("win rate, length-controlled", *controlled, len(mine), scorer, note))
    found.append(Figure("ties", ties, None, None, len(mine), scorer))
    if any(battle.flipped for battle in mine):
        flips = sum(battle.flipped for battle in mine) / len(mine)
        note = "verdicts that changed with the places of the answers; they count as ties"
        found.append(Figure("position flips", flips, None, None, len(mine), scorer, note))
    return found


def pair_table(battles: Sequence[Battle], models: Sequence[str], resamples: int) -> list[Json]:
    """One row for each pair of models that met: how often the first won, tied and lost."""
    rows = []
    for first, second in combinations(models, 2):
        met = between(battles, first, second)
        if met:
            outcomes = [battle.seen_from(first)[0] for battle in met]
            rate, low, high = win_rate(met, first, resamples)
            rows.append(
                {
                    "model": first,
                    "against": second,
                    "won": sum(o > 0.5 for o in outcomes),
                    "tied": sum(o == 0.5 for o in outcomes),
                    "lost": sum(o < 0.5 for o in outcomes),
                    "win rate": round(rate, 4),
                    "low": round(low, 4),
                    "high": round(high, 4),
                }
            )
    return rows


Ask = Callable[[list[tuple[int, str, str]]], list[float]]
"""Asks a judge: (prompt's number, first answer, second answer) to the probability that the first is better."""


def judge_both_ways(ask: Ask, rows: Sequence[tuple[int, str, str]]) -> list[tuple[float, bool]]:
    """The outcome for the first answer of each row, and whether the judge's verdict followed the places.

    Both orders are asked. The same answer twice is a tie that nobody is asked about.
    """
    asked = [row for row in rows if row[1] != row[2]]
    said = ask([row for number, first, second in asked for row in ((number, first, second), (number, second, first))])
    verdicts = iter(zip(said[::2], said[1::2], strict=True))
    found = []
    for _, first, second in rows:
        if first == second:
            found.append((0.5, False))
            continue
        forth, back = next(verdicts)
        signs = (np.sign(forth - 0.5), np.sign(0.5 - back))
        flipped = bool(signs[0] * signs[1] < 0)
        total = 0.0 if flipped else float(np.sign(signs[0] + signs[1]))
        found.append((0.5 + 0.5 * total, flipped))
    return found
