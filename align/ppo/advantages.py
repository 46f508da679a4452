"""Generalised advantage estimation; imports torch alone."""

import torch
from torch import Tensor

from align.tensor_ops import length_mask


def advantages_and_returns(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE (Schulman et al. 2016, equation 16) with the value after the last token taken as 0.

    Args:
        rewards: [B, T], 0 past the end.
        values: [B, T], each read before its token.
        lengths: [B] response tokens.
        gamma, lam: discount and lambda.

    Returns:
        Advantages and returns [B, T], both before any whitening and 0 past the end; returns = advantages + values.
    """
    mask = length_mask(lengths, rewards.shape[1])
    values = values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    following = torch.zeros_like(carried)
    for t in reversed(range(rewards.shape[1])):
        inside = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        # Past a row's end nothing is carried, so that its last real token sees a value of 0 behind it.
        carried = torch.where(inside, delta + gamma * lam * carried, torch.zeros_like(carried))
        following = values[:, t]
        advantages[:, t] = carried
    return advantages, (advantages + values).masked_fill(~mask, 0.0)
