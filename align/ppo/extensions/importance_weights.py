"""Truncated importance sampling: corrects for a sampling engine whose distribution differs from the policy's."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from align.core.tensor_ops import length_mask, masked_mean
from align.ppo.extensions import Extension
from align.ppo.records import RoleOutputs, Rollout, TrainingSignal


class ImportanceWeights(Extension):
    """Weights each token's policy loss by p(policy) / p(engine), at most `cap`."""

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self.latest: dict[str, float] = {}

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        engine_log_probs = rollout.engine_log_probs
        if engine_log_probs is None:
            return signal
        weights = importance_weights(old.log_probs, engine_log_probs, self.cap)
        mask = length_mask(rollout.lengths, weights.shape[1])
        capped = masked_mean((weights >= self.cap * (1 - 1e-6)).float(), mask)
        self.latest = {
            "sampling/importance_weight": float(masked_mean(weights, mask)),
            "sampling/importance_clipfrac": float(capped),
        }
        return replace(signal.multiply_token_weights(weights), corrects_sampling=True)

    def metrics(self) -> dict[str, float]:
        return self.latest


def importance_weights(log_probs: Tensor, engine_log_probs: Tensor, cap: float) -> Tensor:
    """Return p(policy) / p(engine) of each token, at most `cap`; shaped like the input.

    Weighting the policy losses by it corrects for an engine that samples from a slightly different distribution (truncated
    importance sampling; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").

    Args:
        log_probs: the policy's log-probs at sampling time, without gradient.
        engine_log_probs: the engine's log-probs of the same tokens.
        cap: maximum weight, at least 1.
    """
    return torch.exp((log_probs - engine_log_probs).clamp(max=math.log(cap)))
