"""How good a reward model is on held-out rankings. Plain Python and torch; nothing here touches a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from align.core.statistics import correlation, kendall_tau, pair_calibration_error, share_interval
from align.reward.loss import Pairs, pairs_of, ranking_loss


@dataclass(frozen=True)
class ScoredRanking:
    """A ranking with the model's rewards.

    Attributes:
        ranks: [K], 1 is best.
        rewards: [K].
        lengths: [K] response tokens.
        category: what the ranking is about, if the data says so.
    """

    ranks: tuple[int, ...]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    category: str | None = None

    def row(self) -> dict[str, object]:
        """As a row of validation.json."""
        return {"ranks": self.ranks, "rewards": self.rewards, "lengths": self.lengths, "category": self.category}


def pairs_and_differences(rankings: Sequence[ScoredRanking]) -> tuple[Pairs, Tensor]:
    """All pairs that labelers ranked differently, and the reward of each better response minus that of the worse one [P]."""
    rewards = torch.tensor([reward for item in rankings for reward in item.rewards], dtype=torch.float64)
    pairs = pairs_of([list(item.ranks) for item in rankings], [0.0] * len(rankings))
    return pairs, rewards[pairs.better] - rewards[pairs.worse]


def ranking_metrics(rankings: Sequence[ScoredRanking]) -> dict[str, float]:
    """All metrics of a reward model on `rankings`; docs/metrics.md defines each."""
    rewards = torch.tensor([value for item in rankings for value in item.rewards], dtype=torch.float64)
    lengths = torch.tensor([value for item in rankings for value in item.lengths], dtype=torch.float64)
    pairs, difference = pairs_and_differences(rankings)
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    low, high = share_interval(right.numpy(), pairs.ranking.numpy())  # pairs of a ranking depend on each other
    metrics = {
        "loss": float(ranking_loss(rewards, pairs._replace(weight=pairs.weight.double()))) / len(rankings),
        "accuracy": float(right.mean()),
        "accuracy/low": low,
        "accuracy/high": high,
        "pairs": float(len(right)),
        "calibration_error": pair_calibration_error(difference),
        "kendall_tau": sum(kendall_tau(item.ranks, item.rewards) for item in rankings) / len(rankings),
        "length_correlation": correlation(rewards, lengths),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
    }
    for distance in sorted(set(pairs.distance.tolist())):
        metrics[f"accuracy/distance_{distance}"] = float(right[pairs.distance == distance].mean())
    return metrics
