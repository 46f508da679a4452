"""How far the policy is from the reference, and what that costs; imports torch alone."""

from typing import Protocol

import torch
from torch import Tensor


def kl_estimates(log_probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token estimators of KL(policy || reference) on the policy's own samples: k1 and k3, both shaped like the input.

    k1 = log pi - log ref is unbiased and can be negative; k3 = ref/pi - 1 - log(ref/pi) is unbiased, never negative, and
    varies less near 0 (Schulman, "Approximating KL divergence", 2020).
    """
    k1 = log_probs - reference
    return k1, torch.expm1(-k1) + k1


class KLController(Protocol):
    """The coefficient of the KL penalty."""

    beta: float

    def adapt(self, kl: float, samples: int) -> None:
        """Take note of the mean KL of responses (nats, summed over tokens) and of how many there were."""


class FixedKL:
    """A coefficient that stays: 0.02 in InstructGPT, 0.05 in summarize_from_feedback_details."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def adapt(self, kl: float, samples: int) -> None:
        """Nothing changes."""


class AdaptiveKL:
    """Proportional control towards a target (Ziegler et al. 2019, section 2.2; lm-human-preferences, AdaptiveKLController)."""

    def __init__(self, beta: float, target: float, horizon: int) -> None:
        self.beta, self.target, self.horizon = beta, target, horizon

    def adapt(self, kl: float, samples: int) -> None:
        """Raise beta while KL is above the target, by at most a fifth a horizon of samples; lower it below."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.beta *= 1.0 + error * samples / self.horizon
