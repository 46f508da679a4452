"""KL between policy and reference: estimators, losses and the penalty's coefficient. Imports only torch."""

from typing import Literal

import torch
from torch import Tensor


def kl_estimates(log_probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token estimators of KL(policy || reference) on the policy's own samples: k1 and k3, both shaped like the input.

    k1 = log pi - log ref is unbiased and can be negative; k3 = ref/pi - 1 - log(ref/pi) is unbiased, never negative, and
    varies less near 0 (Schulman, "Approximating KL divergence", 2020).
    """
    k1 = log_probs - reference
    return k1, torch.expm1(-k1) + k1


KLEstimator = Literal["k1", "k2", "k3"]


def kl_losses(log_probs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token KL as a term of the loss, shaped like the input; gradients flow through `log_probs`.

    On the policy's own samples the gradient of k2 = (log pi - log ref)^2 / 2 is that of the KL in expectation; that of k1
    is 0 in expectation, and that of k3 is the gradient of the KL the other way round, of the reference to the policy.
    """
    k1, k3 = kl_estimates(log_probs, reference)
    return {"k1": k1, "k2": 0.5 * k1**2, "k3": k3}[estimator]


class KLController:
    """The coefficient of the KL penalty, constant here: 0.02 in InstructGPT, 0.05 in summarize_from_feedback_details."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def state(self) -> float:
        """For the checkpoint."""
        return self.beta

    def load_state(self, state: float) -> None:
        """Restore what `state` returned."""
        self.beta = state

    def adapt(self, kl: float, samples: int) -> None:
        """Adapt beta to a rollout; a constant one does not change.

        Args:
            kl: mean over responses, in nats summed over tokens.
            samples: number of responses.
        """


class AdaptiveKL(KLController):
    """Proportional control toward a target (Ziegler et al. 2019, section 2.2; `AdaptiveKLController` there)."""

    def __init__(self, beta: float, target: float, horizon: int) -> None:
        super().__init__(beta)
        self.target, self.horizon = target, horizon

    def adapt(self, kl: float, samples: int) -> None:
        """Raise beta while KL is above the target, by at most 20 % per horizon of samples; lower it below."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.beta *= 1.0 + error * min(samples / self.horizon, 1.0)  # a rollout larger than the horizon must not overshoot
