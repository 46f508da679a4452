"""The loss of PPO, its terms token by token, KL estimators, and the KL penalty's coefficient."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from align.core.tensor_ops import masked_sum


class LossInputs(NamedTuple):
    """What the loss of R responses needs besides the current outputs of policy and critic; all [R, T]."""

    old_log_probs: Tensor
    """Of the policy before its first step on the rollout, not those that a sampling engine reported."""
    old_values: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    returns: Tensor | None
    """None without a critic."""
    token_weights: Tensor | None
    """Of the policy's losses; None: all are 1."""


class LossCoefficients(NamedTuple):
    """The clips and the coefficients of the loss."""

    clip: float
    clip_high: float
    """Upper epsilon of the ratio clip."""
    value_clip: float
    """Infinite: no limit."""
    value_weight: float
    entropy_weight: float
    kl_coef: float
    """Of the KL to the reference as a term of the loss."""
    kl_estimator: Literal["k2", "k3"] | None
    """None: the loss has no such term."""


def ppo_loss(
    new: tuple[Tensor, Tensor, Tensor], old: LossInputs, mask: Tensor, count: float, coefficients: LossCoefficients
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the PPO loss of a micro-batch, and metrics that add up over micro-batches.

    Args:
        new: log-probs, values and entropies [R, T] of the current policy and critic.
        mask: [R, T] True on response tokens.
        count: response tokens of the whole minibatch, over all micro-batches and processes; divides every sum.
    """
    log_probs, values, entropy = new
    policy, policy_clipped = policy_losses(
        log_probs, old.old_log_probs, old.advantages, coefficients.clip, coefficients.clip_high
    )
    if old.token_weights is not None:
        policy = policy * old.token_weights
    terms, clipped = {"policy": (1.0, policy)}, {"policy": policy_clipped}
    if old.returns is not None:
        value, clipped["value"] = value_losses(values, old.old_values, old.returns, coefficients.value_clip)
        terms["value"] = (coefficients.value_weight, value)
    if coefficients.entropy_weight:
        terms["entropy"] = (-coefficients.entropy_weight, entropy)
    if coefficients.kl_estimator:
        terms["kl"] = (coefficients.kl_coef, kl_losses(log_probs, old.ref_log_probs, coefficients.kl_estimator))
    means = {name: masked_sum(losses, mask) / count for name, (_, losses) in terms.items()}
    total = torch.stack([weight * means[name] for name, (weight, _) in terms.items()]).sum()
    with torch.no_grad():
        ratio = torch.exp(log_probs - old.old_log_probs)
        sums = {
            **{f"loss/{name}": mean for name, mean in means.items()},
            **{f"{name}/clipfrac": (where & mask).sum() / count for name, where in clipped.items()},
            "ratio/mean": masked_sum(ratio, mask) / count,
            "ratio/abs_error": masked_sum((ratio - 1).abs(), mask) / count,
            # Schulman's k3 of the step within the update, old to new.
            "policy/approx_kl": masked_sum(ratio - 1 - torch.log(ratio), mask) / count,
        }
    return total, sums


def policy_losses(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Clipped-ratio losses (Schulman et al. 2017, equation 7) and whether they were clipped; all [R, T].

    Args:
        log_probs: of the sampled tokens, under the current policy.
        old_log_probs: of the same tokens, under the policy before its first step on them.
        clip: epsilon; the ratio is clipped to 1 - clip and 1 + clip.
        clip_high: upper epsilon, if it differs (DAPO, arXiv 2503.14476, section 3.1).
    """
    ratio = torch.exp(log_probs - old_log_probs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half of the larger of two squared errors, and whether it is the clipped one; all [R, T].

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
    """The coefficient of the KL penalty: constant, or adapted to a target by proportional control.

    The constant is 0.02 in InstructGPT and 0.05 in summarize_from_feedback_details. The control is that of Ziegler et al.
    2019, section 2.2 (`AdaptiveKLController` in lm-human-preferences).

    Args:
        target: KL in nats per response; 0: the coefficient is constant.
        horizon: responses over which it adapts.
    """

    def __init__(self, coef: float, target: float = 0.0, horizon: int = 10_000) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Raise the coefficient while KL is above the target, by at most 20 % per horizon of samples; lower it below.

        Args:
            kl: mean over responses, in nats summed over tokens.
            samples: number of responses.
        """
        if self.target:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)  # a rollout beyond the horizon must not overshoot

    def state_dict(self) -> float:
        """Return the coefficient."""
        return self.coef

    def load_state_dict(self, state: float) -> None:
        """Restore what `state_dict` returned."""
        self.coef = state
