"""Per-token rewards from scores, and estimators of the advantage of each token.

All estimators take the rewards [B, T] of a full global batch, with the responses to a prompt next to each other, and
return advantages [B, T]. Both are 0 past a response's end. GAE also computes returns [B, T], the critic's targets.
"""

from typing import Literal

import torch
from torch import Tensor

from align.core.tensor_ops import length_mask, whiten

AdvantageEstimator = Literal["gae", "rloo", "grpo", "reinforce++"]
NEEDS_CRITIC = ("gae",)
"""Estimators that use values and compute returns, the targets of the critic. Others return None for these."""
NEEDS_GROUPS = ("rloo", "grpo")
"""Estimators that compare responses to the same prompt: `samples_per_prompt` must be at least 2."""


def add_kl_penalty(scores: Tensor, kl: Tensor, lengths: Tensor, kl_coef: float) -> Tensor:
    """Return per-token rewards [B, T]: -kl_coef times the KL of each token, plus the score on the last real token.

    Args:
        scores: [B] score of each response.
        kl: [B, T] KL of policy to reference, both at the sampling temperature; see `align.ppo.losses.kl_estimate`.
        lengths: [B] response tokens, at least 1.

    Source: lm-human-preferences, `train_policy.py`, `compute_rewards`.
    """
    mask = length_mask(lengths, kl.shape[1])
    rewards = (-kl_coef * kl).masked_fill(~mask, 0.0)
    return rewards.scatter_add(1, (lengths - 1)[:, None], scores.to(rewards.dtype)[:, None])


def estimate_advantages(
    estimator: AdvantageEstimator,
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    gamma: float,
    lam: float,
    samples: int,
    value_lam: float | None = None,
    min_std: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [B, T] by the named estimator, and returns [B, T] if there is a critic. Arguments are as below."""
    if estimator == "gae":
        return gae(rewards, values, lengths, gamma, lam, value_lam, min_std)
    if estimator == "reinforce++":
        return reinforce_plus_plus(rewards, lengths, gamma), None
    return {"rloo": rloo, "grpo": grpo}[estimator](rewards, lengths, samples), None


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    gamma: float,
    lam: float,
    value_lam: float | None = None,
    min_std: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: whitened advantages, and returns for the critic, both [B, T].

    Args:
        values: [B, T], predicted before each token.
        value_lam: lambda of the returns (decoupled GAE: VC-PPO, arXiv 2503.01491). Default: `lam`.
        min_std: minimum standard deviation for whitening, see `min_advantage_std`.
    """
    advantages, returns = advantages_and_returns(rewards, values, lengths, gamma, lam)
    if value_lam is not None and value_lam != lam:
        _, returns = advantages_and_returns(rewards, values, lengths, gamma, value_lam)
    return whiten(advantages, length_mask(lengths, rewards.shape[1]), min_std=min_std), returns


def min_advantage_std(scores: Tensor, floor: float) -> float:
    """Return the minimum standard deviation for whitening advantages.

    Whitening scales advantages of any size to unit variance. If scores are nearly equal, or the critic predicts them, only
    noise remains, which the policy would follow. The result is `floor` times the standard deviation of the scores,
    or times a tenth of their root mean square, or times 0.01, whichever is largest.

    Args:
        scores: [B] scores of a rollout.
        floor: 0 gives 0.
    """
    return floor * max(float(scores.std(correction=0)), 0.1 * float(scores.square().mean().sqrt()), 0.01)


def rloo(rewards: Tensor, lengths: Tensor, samples: int) -> Tensor:
    """REINFORCE leave-one-out: a response's reward minus the mean of the others' (Ahmadian et al. 2024, arXiv 2402.14740).

    Args:
        samples: number of responses per prompt, at least 2.
    """
    totals = rewards.sum(1).view(-1, samples)
    others = (totals.sum(1, keepdim=True) - totals) / (samples - 1)
    return _on_each_token((totals - others).flatten(), lengths, rewards.shape[1])


def grpo(rewards: Tensor, lengths: Tensor, samples: int, epsilon: float = 1e-4) -> Tensor:
    """Group-relative: a response's reward standardized among those to its prompt (Shao et al. 2024, arXiv 2402.03300).

    Args:
        samples: number of responses per prompt, at least 2.
        epsilon: added to the standard deviation, which is 0 if all rewards are equal.
    """
    totals = rewards.sum(1).view(-1, samples)
    deviation = totals - totals.mean(1, keepdim=True)
    standardized = deviation / (totals.std(1, correction=0, keepdim=True) + epsilon)
    return _on_each_token(standardized.flatten(), lengths, rewards.shape[1])


def reinforce_plus_plus(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Discounted sums of future rewards, whitened over the full batch (Hu 2025, arXiv 2501.03262)."""
    # With lambda 1 and values of 0, an advantage is the discounted sum of future rewards.
    sums, _ = advantages_and_returns(rewards, torch.zeros_like(rewards), lengths, gamma, 1.0)
    return whiten(sums, length_mask(lengths, rewards.shape[1]))


def _on_each_token(values: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Expand one value [B] per response to its tokens [B, width], 0 past its end."""
    return values[:, None] * length_mask(lengths, width)


def advantages_and_returns(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute GAE (Schulman et al. 2016, equation 16) with a value of 0 after the last token.

    Args:
        values: [B, T], predicted before each token.

    Returns:
        Advantages and returns [B, T], both before any whitening and 0 past the end; returns = advantages + values.
    """
    mask = length_mask(lengths, rewards.shape[1])
    values = values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(next_advantage)
    for t in reversed(range(rewards.shape[1])):
        inside = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # Past a response's end both stay 0: the value after its last token is 0.
        advantages[:, t] = torch.where(inside, delta + gamma * lam * next_advantage, torch.zeros_like(delta))
        next_advantage, next_value = advantages[:, t], values[:, t]
    return advantages, (advantages + values).masked_fill(~mask, 0.0)
