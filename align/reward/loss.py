"""The losses on pairs of ranked responses, of a reward model and of DPO; imports only torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Comparison(NamedTuple):
    """Two responses of a ranking by index, as labeled; see `Pairs`."""

    better: int
    worse: int
    distance: int
    margin: float = 0.0
    win: float = 1.0


class Pairs(NamedTuple):
    """All pairs of responses for the loss on a batch of rankings, each [pairs].

    Attributes:
        better: index of the better response.
        worse: index of the worse one.
        weight: 1 over the number of pairs in the ranking: every ranking counts as one (InstructGPT, equation 1).
        distance: difference of their ranks.
        ranking: index of the ranking.
        margin: required difference of rewards.
        win: probability that the better one is better; 1 for certain labels.
    """

    better: Tensor
    worse: Tensor
    weight: Tensor
    distance: Tensor
    ranking: Tensor
    margin: Tensor
    win: Tensor

    def to(self, device: torch.device) -> "Pairs":
        """Return the pairs on a device."""
        return Pairs(*(column.to(device) for column in self))


def compare_by_rank(ranks: Sequence[int]) -> list[Comparison]:
    """Return the pairs of a ranking by its ranks [K], 1 for the best; equal ranks give none."""
    places = range(len(ranks))
    return [Comparison(i, j, ranks[j] - ranks[i]) for i in places for j in places if ranks[i] < ranks[j]]


def compare_by_preference(preferences: Sequence[Sequence[float]], ranks: Sequence[int]) -> list[Comparison]:
    """Return all pairs of a ranking by the probabilities [K, K] that response i is better than response j.

    Both orders get half of the probability of a tie.

    Args:
        ranks: [K], for `distance`, which is negative if ranks and probabilities disagree.
    """
    found = []
    for i in range(len(ranks)):
        for j in range(i + 1, len(ranks)):
            better, worse = (i, j) if preferences[i][j] >= preferences[j][i] else (j, i)
            win = preferences[better][worse]
            tie = max(0.0, 1.0 - win - preferences[worse][better])
            found.append(Comparison(better, worse, ranks[worse] - ranks[better], 0.0, win + tie / 2))
    return found


def stack_pairs(rankings: Sequence[Sequence[Comparison]], sizes: Sequence[int]) -> Pairs:
    """Return the pairs of P rankings with consecutive response indices. `sizes` [P] is the number of responses of each."""
    rows: list[tuple[float, ...]] = []
    offset = 0
    for number, (found, size) in enumerate(zip(rankings, sizes, strict=True)):
        for pair in found:
            places = (offset + pair.better, offset + pair.worse)
            rows.append((*places, 1.0 / len(found), pair.distance, number, pair.margin, pair.win))
        offset += size
    columns = zip(*rows, strict=True) if rows else [()] * len(Pairs._fields)
    floats = ("weight", "margin", "win")
    return Pairs(
        *(
            torch.tensor(column, dtype=torch.float32 if name in floats else torch.long)
            for name, column in zip(Pairs._fields, columns, strict=True)
        )
    )


def pairs_of(ranks: Sequence[Sequence[int]]) -> Pairs:
    """Return the pairs of P rankings without margins, each K ranks with 1 for the best; ties give no pair."""
    return stack_pairs([compare_by_rank(row) for row in ranks], [len(row) for row in ranks])


ROUNDING = 1e-5
"""Rewards this close are equal: rewards of equal responses differ by rounding, which depends on the batch."""


def ordered_rightly(difference: Tensor) -> Tensor:
    """Return 1 if the better response has the higher reward, one half for equal rewards, else 0 [pairs].

    Args:
        difference: [pairs] reward of the better response minus reward of the worse one.
    """
    return 0.5 + 0.5 * difference.sign() * (difference.abs() > ROUNDING)


def ranking_loss(rewards: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum over rankings of the mean cross-entropy between pair labels and the Bradley-Terry model.

    For certain labels, it is -log sigmoid(r_better - r_worse - margin).

    Args:
        rewards: [B] rewards of all responses.
        pairs: from `stack_pairs`, on the same device.

    Source: InstructGPT, equation 1; the margin is Llama 2's, section 3.2.2.
    """
    difference = rewards[pairs.better] - rewards[pairs.worse] - pairs.margin
    return -(pairs.weight * (pairs.win * logsigmoid(difference) + (1.0 - pairs.win) * logsigmoid(-difference))).sum()


def centering_loss(rewards: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum over rankings of the mean over pairs of (r_better + r_worse)^2, which keeps rewards near 0.

    Differences determine rewards only up to a constant; this loss fixes it (Eisenstein et al. 2023, section 3.2).
    """
    return (pairs.weight * (rewards[pairs.better] + rewards[pairs.worse]) ** 2).sum()


def dpo_losses(difference: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta d), smoothed: -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d); [pairs].

    Args:
        difference: d [pairs], the better response's log-ratio log pi(y|x) - log ref(y|x), in nats, minus the worse one's.
        beta: strength of the implicit KL constraint.
        label_smoothing: e, the probability that the label of a pair is flipped.

    Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7; smoothing: Mitchell 2023, "A note on DPO with noisy
    preferences and relationship to IPO".
    """
    losses = -logsigmoid(beta * difference)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * logsigmoid(-beta * difference)
    return losses


def ipo_losses(difference: Tensor, beta: float) -> Tensor:
    """(d - 1 / (2 beta))^2; [pairs]: IPO has a finite target margin; DPO's loss has no minimum.

    Args:
        difference: as for `dpo_losses`, but of log-ratios that are means over each response's tokens.
        beta: the paper's tau.

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17; that the log-ratios are means over tokens is what its authors
    told TRL, whose `ipo` is the same.
    """
    return (difference - 1 / (2 * beta)) ** 2
