"""How good a reward model is on held-out rankings. Plain Python and torch; nothing here touches a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from align.eval.intervals import mean_interval
from align.reward.loss import pairs_of, ranking_loss


@dataclass(frozen=True)
class Scored:
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


def summarize(rankings: Sequence[Scored], resamples: int = 1000) -> dict[str, float]:
    """All figures of a reward model on `rankings`; docs/metrics.md defines each.

    Args:
        resamples: bootstrap resamples of rankings for the interval of pair accuracy.
    """
    rewards = torch.tensor([value for item in rankings for value in item.rewards], dtype=torch.float64)
    lengths = torch.tensor([value for item in rankings for value in item.lengths], dtype=torch.float64)
    pairs = pairs_of([list(item.ranks) for item in rankings], [0.0] * len(rankings))
    difference = rewards[pairs.better] - rewards[pairs.worse]
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    # Pairs of a ranking hang together: whole rankings are drawn again.
    low, high = mean_interval(right.numpy(), resamples, pairs.ranking.tolist())
    figures = {
        "loss": float(ranking_loss(rewards, pairs._replace(weight=pairs.weight.double()))) / len(rankings),
        "accuracy": float(right.mean()),
        "accuracy/low": low,
        "accuracy/high": high,
        "pairs": float(len(right)),
        "calibration_error": calibration_error(difference),
        "kendall_tau": sum(kendall_tau(item.ranks, item.rewards) for item in rankings) / len(rankings),
        "length_correlation": correlation(rewards, lengths),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
    }
    for distance in sorted(set(pairs.distance.tolist())):
        figures[f"accuracy/distance_{distance}"] = float(right[pairs.distance == distance].mean())
    return figures


def calibration(difference: Tensor, bins: int = 10) -> list[tuple[float, float, int]]:
    """Stated against actual: (mean stated probability, share that was right, pairs) of each bin that is not empty.

    The model states sigmoid(|difference|) for the response that it prefers, which lies between 0.5 and 1.
    """
    stated = torch.sigmoid(difference.abs())
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    place = ((stated - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    table = []
    for number in range(bins):
        inside = place == number
        if inside.any():
            table.append((float(stated[inside].mean()), float(right[inside].mean()), int(inside.sum())))
    return table


def calibration_error(difference: Tensor, bins: int = 10) -> float:
    """Expected calibration error: the mean of |stated - actual| over bins, weighed by their pairs (Guo et al. 2017)."""
    table = calibration(difference, bins)
    total = sum(count for _, _, count in table)
    return sum(abs(stated - actual) * count for stated, actual, count in table) / max(1, total)


def kendall_tau(ranks: Sequence[int], rewards: Sequence[float]) -> float:
    """Kendall's tau-b between a ranking and rewards: 1 same order, -1 reversed; ties on either side are allowed for."""
    score, ranked, rewarded = 0, 0, 0
    for i in range(len(ranks)):
        for j in range(i):
            by_rank = (ranks[i] < ranks[j]) - (ranks[i] > ranks[j])
            by_reward = (rewards[i] > rewards[j]) - (rewards[i] < rewards[j])
            score += by_rank * by_reward
            ranked += by_rank != 0
            rewarded += by_reward != 0
    return score / math.sqrt(ranked * rewarded) if ranked and rewarded else 0.0


def correlation(left: Tensor, right: Tensor) -> float:
    """Pearson's correlation; 0 where one side does not vary."""
    left, right = left - left.mean(), right - right.mean()
    scale = float(left.norm() * right.norm())
    return float(left @ right) / scale if scale > 0 else 0.0
