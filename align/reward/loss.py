"""The ranking loss of the reward model; imports only torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Comparison(NamedTuple):
    """Two responses of a ranking, as labeled; see `Pairs`."""

    better: int
    worse: int
    distance: int
    margin: float = 0.0
    win: float = 1.0


class Pairs(NamedTuple):
    """All pairs of responses of a batch of rankings that a loss is taken on, each [P].

    Attributes:
        better: index of the better response.
        worse: index of the worse one.
        weight: 1 over the number of pairs in the ranking: every ranking counts as one (InstructGPT, equation 1).
        distance: how many ranks apart they are.
        ranking: index of the ranking.
        margin: difference of rewards that is asked for.
        win: probability that the better one is better; 1 if labels are sure.
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
    """The pairs of a ranking, by its ranks [K], 1 for the best; equal ranks give none."""
    places = range(len(ranks))
    return [Comparison(i, j, ranks[j] - ranks[i]) for i in places for j in places if ranks[i] < ranks[j]]


def compare_by_preference(preferences: Sequence[Sequence[float]], ranks: Sequence[int]) -> list[Comparison]:
    """All pairs of a ranking, by the probabilities [K, K] that response i is better than response j.

    Both orders get half of the probability of a tie.

    Args:
        ranks: [K], for `distance`, which is negative where ranks and probabilities disagree.
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
    """The pairs of several rankings whose responses are numbered one after another.

    Args:
        rankings: P lists of pairs.
        sizes: [P], responses of each ranking.
    """
    rows: list[tuple[int, int, float, int, int, float, float]] = []
    offset = 0
    for number, (found, size) in enumerate(zip(rankings, sizes, strict=True)):
        for pair in found:
            where = (offset + pair.better, offset + pair.worse, 1.0 / len(found), pair.distance, number)
            rows.append((*where, pair.margin, pair.win))
        offset += size
    columns = list(zip(*rows, strict=True)) or [()] * len(Pairs._fields)
    return Pairs(
        *(
            torch.tensor(column, dtype=torch.float32 if name in ("weight", "margin", "win") else torch.long)
            for name, column in zip(Pairs._fields, columns, strict=True)
        )
    )


def pairs_of(ranks: Sequence[Sequence[int]], margins: Sequence[float] | None = None) -> Pairs:
    """The pairs of several rankings whose labels are sure and whose ties give no pair.

    Args:
        ranks: P lists of K ranks, 1 is best.
        margins: [P].
    """
    margins = [0.0] * len(ranks) if margins is None else margins
    rankings = [
        [pair._replace(margin=margin) for pair in compare_by_rank(row)] for row, margin in zip(ranks, margins, strict=True)
    ]
    return stack_pairs(rankings, [len(row) for row in ranks])


def ranking_loss(rewards: Tensor, pairs: Pairs) -> Tensor:
    """Sum over rankings of the mean over pairs of the cross-entropy of their labels and the Bradley-Terry model.

    Where labels are sure, that is -log sigmoid(r_better - r_worse - margin).

    Args:
        rewards: [B] of all responses.
        pairs: from `stack_pairs`, on the same device.

    Source: InstructGPT, equation 1; the margin is Llama 2's, section 3.2.2.
    """
    difference = rewards[pairs.better] - rewards[pairs.worse] - pairs.margin
    return -(pairs.weight * (pairs.win * logsigmoid(difference) + (1.0 - pairs.win) * logsigmoid(-difference))).sum()


def centering_loss(rewards: Tensor, pairs: Pairs) -> Tensor:
    """Sum over rankings of the mean over pairs of (r_better + r_worse)^2: keeps rewards near 0.

    Differences alone leave the level of rewards open; this settles it (Eisenstein et al. 2023, section 3.2).
    """
    return (pairs.weight * (rewards[pairs.better] + rewards[pairs.worse]) ** 2).sum()
