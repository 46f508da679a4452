"""The ranking loss of the reward model; imports only torch."""

import math
from collections.abc import Callable, Sequence
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
    tie: float = 0.0


class Pairs(NamedTuple):
    """All pairs of responses of a batch of rankings that a loss is taken on, each [P].

    Attributes:
        better: index of the better response, or of the first of a tie.
        worse: index of the worse one.
        weight: 1 over the number of pairs in the ranking: every ranking counts as one (InstructGPT, equation 1).
        distance: how many ranks apart they are.
        ranking: index of the ranking.
        margin: difference of rewards that is asked for.
        win: probability that the better one is better; 1 if labels are sure.
        tie: probability that both are equally good; the rest of 1 is that the worse one is better.
    """

    better: Tensor
    worse: Tensor
    weight: Tensor
    distance: Tensor
    ranking: Tensor
    margin: Tensor
    win: Tensor
    tie: Tensor


def compare_by_rank(ranks: Sequence[int], with_ties: bool = False) -> list[Comparison]:
    """The pairs of a ranking, by its ranks [K], 1 for the best; equal ranks give none unless `with_ties`."""
    places = range(len(ranks))
    found = [Comparison(i, j, ranks[j] - ranks[i]) for i in places for j in places if ranks[i] < ranks[j]]
    if with_ties:
        found += [Comparison(i, j, 0, win=0.0, tie=1.0) for i in places for j in places if i < j and ranks[i] == ranks[j]]
    return found


def compare_by_preference(
    preferences: Sequence[Sequence[float]], ranks: Sequence[int], with_ties: bool = False
) -> list[Comparison]:
    """All pairs of a ranking, by the probabilities [K, K] that response i is better than response j.

    Args:
        ranks: [K], for `distance`, which is negative where ranks and probabilities disagree.
        with_ties: False: a tie's probability is shared equally by both orders.
    """
    found = []
    for i in range(len(ranks)):
        for j in range(i + 1, len(ranks)):
            better, worse = (i, j) if preferences[i][j] >= preferences[j][i] else (j, i)
            win = preferences[better][worse]
            tie = max(0.0, 1.0 - win - preferences[worse][better])
            outcome = (win, tie) if with_ties else (win + tie / 2, 0.0)
            found.append(Comparison(better, worse, ranks[worse] - ranks[better], 0.0, *outcome))
    return found


def stack_pairs(rankings: Sequence[Sequence[Comparison]], sizes: Sequence[int]) -> Pairs:
    """The pairs of several rankings whose responses are numbered one after another.

    Args:
        rankings: N lists of pairs.
        sizes: [N], responses of each ranking.
    """
    rows: list[tuple[int, int, float, int, int, float, float, float]] = []
    offset = 0
    for number, (found, size) in enumerate(zip(rankings, sizes, strict=True)):
        for pair in found:
            where = (offset + pair.better, offset + pair.worse, 1.0 / len(found), pair.distance, number)
            rows.append((*where, pair.margin, pair.win, pair.tie))
        offset += size
    columns = list(zip(*rows, strict=True)) or [()] * len(Pairs._fields)
    return Pairs(
        *(
            torch.tensor(column, dtype=torch.float32 if name in ("weight", "margin", "win", "tie") else torch.long)
            for name, column in zip(Pairs._fields, columns, strict=True)
        )
    )


def pairs_of(ranks: Sequence[Sequence[int]], margins: Sequence[float] | None = None) -> Pairs:
    """The pairs of several rankings whose labels are sure and whose ties give no pair.

    Args:
        ranks: N lists of K ranks, 1 is best.
        margins: [N].
    """
    margins = [0.0] * len(ranks) if margins is None else margins
    rankings = [
        [pair._replace(margin=margin) for pair in compare_by_rank(row)] for row, margin in zip(ranks, margins, strict=True)
    ]
    return stack_pairs(rankings, [len(row) for row in ranks])


Outcomes = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities [P] that the better response wins, of a tie, and that the worse one wins."""


def bradley_terry(difference: Tensor) -> Outcomes:
    """Outcomes of pairs whose rewards are `difference` [P] apart, if there are no ties: sigmoid of the difference."""
    return logsigmoid(difference), torch.zeros_like(difference), logsigmoid(-difference)


def davidson(difference: Tensor, tie_probability: float) -> Outcomes:
    """Davidson's model of ties: with strengths s = exp(reward), outcomes are as s_i : nu sqrt(s_i s_j) : s_j.

    Args:
        difference: [P].
        tie_probability: of equally good responses, nu / (2 + nu), above 0 and below 1.

    Source: Davidson 1970, "On extending the Bradley-Terry model to accommodate ties in paired comparison experiments".
    """
    nu = 2 * tie_probability / (1 - tie_probability)
    tie = torch.full_like(difference, math.log(nu))
    win, tie, lose = torch.stack([difference / 2, tie, -difference / 2]).log_softmax(0)
    return win, tie, lose


def ranking_loss(rewards: Tensor, pairs: Pairs, outcomes: Callable[[Tensor], Outcomes] = bradley_terry) -> Tensor:
    """Sum over rankings of the mean over pairs of the cross-entropy of their labels and outcomes.

    Where labels are sure and there are no ties, that is -log sigmoid(r_better - r_worse - margin).

    Args:
        rewards: [R] of all responses.
        pairs: from `stack_pairs`, on the same device.
        outcomes: the model of what comes out of a pair.

    Source: InstructGPT, equation 1; the margin is Llama 2's, section 3.2.2.
    """
    win, tie, lose = outcomes(rewards[pairs.better] - rewards[pairs.worse] - pairs.margin)
    return -(pairs.weight * (pairs.win * win + pairs.tie * tie + (1.0 - pairs.win - pairs.tie) * lose)).sum()


def centering_loss(rewards: Tensor, pairs: Pairs) -> Tensor:
    """Sum over rankings of the mean over pairs of (r_better + r_worse)^2: keeps rewards near 0.

    Differences alone leave the level of rewards open; this settles it (Eisenstein et al. 2023, section 3.2).
    """
    return (pairs.weight * (rewards[pairs.better] + rewards[pairs.worse]) ** 2).sum()
