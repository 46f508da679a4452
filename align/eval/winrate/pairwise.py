"""Comparisons of two answers to the same prompt, and the win rates that follow from them.

An outcome is 1 if the first model won, 0 if the second did, 0.5 for a tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from align.core.statistics import share_interval
from align.eval.core.results import Json


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
            outcomes = [comparison.outcome_for(first) for comparison in of_pair]
            rate, low, high = win_rate(of_pair, first)
            rows.append(
                {
                    "model": first,
                    "against": second,
                    "won": sum(outcome > 0.5 for outcome in outcomes),
                    "tied": sum(outcome == 0.5 for outcome in outcomes),
                    "lost": sum(outcome < 0.5 for outcome in outcomes),
                    "win rate": round(rate, 4),
                    "low": round(low, 4),
                    "high": round(high, 4),
                }
            )
    return rows
