"""The losses of PPO token by token, KL estimators, and the KL penalty's coefficient; imports only torch.

The caller sums the losses and divides them by global counts.
"""

import math
from typing import Literal

import torch
from torch import Tensor


def policy_losses(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Clipped-ratio losses (Schulman et al. 2017, equation 7) and whether they were clipped; all [B, T].

    Args:
        log_probs: of the sampled tokens, under the current policy.
        old_log_probs: of the same tokens, under the policy that sampled them.
        clip: epsilon; the ratio is clipped to 1 - clip and 1 + clip.
        clip_high: upper epsilon, if it differs (DAPO, arXiv 2503.14476, section 3.1).
    """
    ratio = torch.exp(log_probs - old_log_probs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return torch.maximum(unclipped, clipped), clipped > unclipped


def importance_weights(log_probs: Tensor, engine_log_probs: Tensor, cap: float) -> Tensor:
    """Return p(policy) / p(engine) of each token, at most `cap`; shaped like the input.

    Weighting the policy losses by it corrects for an engine that samples from a slightly different distribution (truncated
    importance sampling; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").

    Args:
        log_probs: of the policy at sampling time, without gradient.
        engine_log_probs: of the same tokens, as the engine computed them.
        cap: at least 1.
    """
    return torch.exp((log_probs - engine_log_probs).clamp(max=math.log(cap)))


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half of the larger of two squared errors, and whether it is the clipped one; all [B, T].

    The second error is that of values held within `clip` of the old ones (lm-human-preferences, `train_policy.py`, `loss`);
    with an infinite `clip`, both are the same.
    """
    near = values.clamp(old_values - clip, old_values + clip)  # exact for values within the clip, unlike old + difference
    unclipped, clipped = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def kl_estimates(log_probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token estimators of KL(policy || reference) on the policy's own samples: k1 and k3, both shaped like the input.

    k1 = log pi - log ref is unbiased and can be negative; k3 = ref/pi - 1 - log(ref/pi) is unbiased, never negative, and
    varies less near 0 (Schulman, "Approximating KL divergence", 2020).
    """
    k1 = log_probs - reference
    return k1, torch.expm1(-k1) + k1


def kl_losses(log_probs: Tensor, reference: Tensor, estimator: Literal["k2", "k3"]) -> Tensor:
    """Per-token KL as a term of the loss, shaped like the input; gradients flow through `log_probs`.

    On the policy's own samples the gradient of k2 = (log pi - log ref)^2 / 2 is that of the KL in expectation; that of k3
    is the gradient of the KL of the reference to the policy. k1 cannot be a loss: its gradient is 0 in expectation.
    """
    k1, k3 = kl_estimates(log_probs, reference)
    return 0.5 * k1**2 if estimator == "k2" else k3


class KLController:
    """The coefficient of the KL penalty, constant here: 0.02 in InstructGPT, 0.05 in summarize_from_feedback_details."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def state_dict(self) -> float:
        """For the checkpoint."""
        return self.beta

    def load_state_dict(self, state: float) -> None:
        """Restore what `state_dict` returned."""
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
