"""Rankings in memory: scoring by a model, and the metrics of a reward model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batches.micro_batches import PackedInputs, map_rows
from align.core.statistics import correlation, kendall_tau, pair_calibration_error, share_interval
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.reward.loss import (
    Pairs,
    compare_by_preference,
    compare_by_rank,
    ordered_rightly,
    pairs_of,
    ranking_loss,
    stack_pairs,
)
from align.runtime.flops import FlopsProfile, training_flops
from align.tokenization.encoded import EncodedRanking, SharedPrompt

Ranked = TypeVar("Ranked", bound=SharedPrompt)

RewardFunctionOfTokens = Callable[[Padded, Padded, Tensor | None], Tensor]
"""Maps prompts [P], responses [B] and the prompt index of each response [B] (or None) to rewards [B]."""


def group_sizes(backbone: Backbone, rankings: Sequence[SharedPrompt]) -> list[int]:
    """Return the number of tokens in memory for each ranking, a prompt with all responses."""
    return [backbone.tokens_in_memory(len(item.prompt), list(map(len, item.responses))) for item in rankings]


def group_flops(
    backbone: Backbone,
    profile: FlopsProfile,
    ranking: SharedPrompt,
    flops: Callable[[FlopsProfile, int, Sequence[int], int], float] = training_flops,
    predicted: Sequence[int] = (),
) -> float:
    """Return the FLOPs of a ranking. `predicted` are the numbers of tokens per response that need the vocabulary matrix."""
    lengths = list(map(len, ranking.responses))
    if backbone.shares_prompts:
        return flops(profile, len(ranking.prompt), lengths, sum(predicted))
    counts = predicted or [0] * len(lengths)
    return sum(flops(profile, len(ranking.prompt), [length], count) for length, count in zip(lengths, counts, strict=True))


@torch.no_grad()
def score_rankings(
    read: Callable[[Sequence[Ranked]], Tensor],
    rankings: Sequence[Ranked],
    backbone: Backbone,
    budget: int,
    accelerator: Accelerator,
) -> list[list[float]]:
    """Return a number for each response of each ranking, on every process.

    Args:
        read: function that computes the numbers [B] of the responses of rankings.
        budget: maximum padded tokens per forward pass.
    """

    def score_rows(rows: list[int]) -> list[list[float]]:
        part = [rankings[row] for row in rows]
        found = iter(read(part).tolist())
        return [[next(found) for _ in item.responses] for item in part]

    return map_rows(group_sizes(backbone, rankings), budget, accelerator, score_rows)


def pack_rankings(rankings: Sequence[SharedPrompt], device: torch.device) -> PackedInputs:
    """Return rankings as inputs of `Backbone.hidden`: their prompts, and all responses in order."""
    prompt_of_response = [number for number, item in enumerate(rankings) for _ in item.responses]
    return PackedInputs(
        prompt=Padded.from_lists([item.prompt for item in rankings]).to(device),
        response=Padded.from_lists([response for item in rankings for response in item.responses]).to(device),
        prompt_of_response=torch.tensor(prompt_of_response, device=device),
    )


def reward_rankings(module: RewardFunctionOfTokens, rankings: Sequence[SharedPrompt], device: torch.device) -> Tensor:
    """Return rewards [B] of all responses in order. Each prompt is processed once if the backbone can share it."""
    inputs = pack_rankings(rankings, device)
    return module(inputs.prompt, inputs.response, inputs.prompt_of_response)


def label_pairs(rankings: Sequence[EncodedRanking], soft_targets: bool) -> Pairs:
    """Return the pairs of a ranking loss, with their margins and probabilities.

    Args:
        soft_targets: whether to train on a ranking's `preferences`, if it has them, instead of its ranks.
    """
    found = []
    for item in rankings:
        if soft_targets and item.preferences is not None:
            pairs = compare_by_preference(item.preferences, item.ranks)
        else:
            pairs = compare_by_rank(item.ranks)
        found.append([pair._replace(margin=item.margin) for pair in pairs])
    return stack_pairs(found, [len(item.responses) for item in rankings])


@dataclass(frozen=True)
class ScoredRanking:
    """A ranking with the model's rewards: a row of validation.json."""

    ranks: tuple[int, ...]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Number of response tokens."""
    category: str | None = None


def with_rewards(rankings: Sequence[EncodedRanking], rewards: Sequence[Sequence[float]]) -> list[ScoredRanking]:
    """Combine rankings with the rewards of their responses."""
    return [
        ScoredRanking(tuple(item.ranks), tuple(found), tuple(map(len, item.responses)), item.category)
        for item, found in zip(rankings, rewards, strict=True)
    ]


def pairs_and_differences(rankings: Sequence[ScoredRanking]) -> tuple[Pairs, Tensor]:
    """Return all untied pairs, and the reward differences between better and worse response [pairs]."""
    rewards = torch.tensor([reward for item in rankings for reward in item.rewards], dtype=torch.float64)
    pairs = pairs_of([item.ranks for item in rankings])
    return pairs, rewards[pairs.better] - rewards[pairs.worse]


def mean_loss(rankings: Sequence[ScoredRanking], pairs: Pairs) -> float:
    """Return the mean over rankings of `ranking_loss` without margins."""
    rewards = torch.tensor([value for item in rankings for value in item.rewards], dtype=torch.float64)
    pairs = pairs._replace(weight=pairs.weight.double(), margin=torch.zeros_like(pairs.margin))
    return float(ranking_loss(rewards, pairs)) / len(rankings)


CHANCE_LOSS = math.log(2)
"""Ranking loss of a model with equal rewards for all responses."""


def chance_warning(loss: float | None) -> str:
    """Return a sentence if a validation loss exceeds the loss of equal rewards; "" if not, or if the loss is None."""
    if loss is None or not loss > CHANCE_LOSS:
        return ""
    return (
        f"the validation loss {loss:.3f} exceeds log 2 = {CHANCE_LOSS:.3f}, the loss of equal rewards for all responses: "
        "the rewards are worse than none"
    )


def ranking_metrics(rankings: Sequence[ScoredRanking]) -> dict[str, float]:
    """Return all metrics of a reward model on `rankings`; docs/metrics.md defines them."""
    rewards = torch.tensor([value for item in rankings for value in item.rewards], dtype=torch.float64)
    lengths = torch.tensor([value for item in rankings for value in item.lengths], dtype=torch.float64)
    pairs, difference = pairs_and_differences(rankings)
    right = ordered_rightly(difference)
    low, high = share_interval(right.numpy(), pairs.ranking.numpy())  # pairs of a ranking depend on each other
    metrics = {
        "loss": mean_loss(rankings, pairs),
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
