"""The targets that rankings give a reward model: their order alone, or also certainty, distance and ties."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import logsigmoid

from align.core.errors import UserError
from align.reward.config import RewardConfig
from align.reward.loss import (
    Comparison,
    Outcomes,
    Pairs,
    bradley_terry,
    compare_by_preference,
    compare_by_rank,
    davidson,
    rao_kupper,
    stack_pairs,
)
from align.tokenization.encoded import EncodedRanking

LARGEST_SLOPE = 5.0
"""Of log-odds per standard deviation of length: where the shorter response always wins, there is no largest one."""


def label_pairs(config: RewardConfig, rankings: Sequence[EncodedRanking], length_slope: float = 0.0) -> Pairs:
    """The pairs that a loss is taken on, with margins and probabilities as the settings want them.

    Args:
        length_slope: what length alone adds to the log-odds of winning for each token (`fit_length_slope`). It enters as
            a margin: what length explains already, the reward need not.
    """
    sizes = [len(item.responses) for item in rankings]
    pairs = stack_pairs([_comparisons(config, item) for item in rankings], sizes)
    if not length_slope:
        return pairs
    return pairs._replace(margin=pairs.margin - length_slope * _longer_by(pairs, rankings))


def fit_length_slope(pairs: Pairs, rankings: Sequence[EncodedRanking]) -> float:
    """How length alone predicts the labels: logistic regression of who wins on the difference of lengths in tokens.

    Args:
        pairs: of `rankings`, all of them.

    Returns:
        The slope, log-odds per token; 0 if all lengths are equal.
    """
    longer, wins = _longer_by(pairs, rankings).double(), (pairs.win + pairs.tie / 2).double()
    scale = float(longer.square().mean().sqrt())
    if scale == 0:
        return 0.0
    unit = longer / scale

    def loss(slope: float) -> float:
        log_odds = slope * unit
        return -float((pairs.weight * (wins * logsigmoid(log_odds) + (1 - wins) * logsigmoid(-log_odds))).sum())

    return float(minimize_scalar(loss, bounds=(-LARGEST_SLOPE, LARGEST_SLOPE), method="bounded").x) / scale


def _longer_by(pairs: Pairs, rankings: Sequence[EncodedRanking]) -> Tensor:
    """By how many tokens the better response of each pair is longer [P]."""
    lengths = torch.tensor([len(ids) for item in rankings for ids in item.responses], dtype=torch.float32)
    return lengths[pairs.better] - lengths[pairs.worse]


def _comparisons(config: RewardConfig, ranking: EncodedRanking) -> list[Comparison]:
    with_ties = config.ties != "ignore"
    if config.soft_targets and ranking.preferences is not None:
        found = compare_by_preference(ranking.preferences, ranking.ranks, with_ties)
    else:
        found = compare_by_rank(ranking.ranks, with_ties)
    return [pair if pair.tie == 1.0 else pair._replace(margin=_margin(config, ranking, pair)) for pair in found]


def _margin(config: RewardConfig, ranking: EncodedRanking, pair: Comparison) -> float:
    if not config.rating_margin or ranking.ratings is None:
        return ranking.margin
    # A rating may say otherwise than the ranks: then it asks for nothing.
    apart = max(0, ranking.ratings[pair.better] - ranking.ratings[pair.worse])
    return ranking.margin + config.rating_margin * apart


def outcome_model(config: RewardConfig) -> Callable[[Tensor], Outcomes]:
    """The model of what comes out of a pair."""
    if config.ties == "ignore":
        return bradley_terry
    return partial({"davidson": davidson, "rao_kupper": rao_kupper}[config.ties], tie_probability=config.tie_probability)


def require_labels(config: RewardConfig, rankings: Sequence[EncodedRanking]) -> None:
    """Refuse settings for which the data has no label at all.

    Raises:
        UserError: if no ranking has the field that a setting reads.
    """
    if config.soft_targets and all(item.preferences is None for item in rankings):
        raise UserError(f"soft_targets: no ranking in {config.train_data} has preferences; export them, or leave it off")
    if config.rating_margin and all(item.ratings is None for item in rankings):
        raise UserError(f"rating_margin: no ranking in {config.train_data} has ratings; set it to 0")
