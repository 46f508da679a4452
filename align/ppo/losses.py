"""The loss of PPO, its terms token by token, KL estimators, and the KL penalty's coefficient.

In `ppo_loss`, `new` is the output of the policy and the critic in training, with gradients. `batch` holds constants from the
rollout: the outputs before the update, advantages and returns. All functions take and return tensors and keep no state;
only `KLController` has one, the coefficient.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from align.core.tensor_ops import BatchLoss, masked_sum

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of the loss of B responses in addition to the current outputs of policy and critic. Tensors are [B, T]."""

    mask: Tensor
    """True on response tokens."""
    old_log_probs: Tensor
    """The policy's log-probs before its first step on the rollout, not the sampling engine's."""
    old_values: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    returns: Tensor | None = None
    """None without a critic that is trained by gradients."""
    token_weights: Tensor | None = None
    """Factors of the policy's losses. None for 1."""
    minibatch_tokens: float
    """Response tokens of the minibatch, over all micro-batches and processes; divides every sum."""


class NewOutputs(Protocol):
    """Outputs [B, T] of the policy and the critic in training; `ActorCriticOutput` has them."""

    @property
    def log_probs(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    @property
    def entropy(self) -> Tensor: ...


class LossCoefficients(NamedTuple):
    """The clips and the coefficients of the loss."""

    cliprange: float
    cliprange_high: float
    """Upper epsilon of the ratio clip."""
    cliprange_value: float
    """Infinite for no limit."""
    vf_coef: float
    ent_coef: float
    kl_coef: float
    """Coefficient of the KL term of the loss."""
    kl_estimator: KLEstimator | None
    """If None, the loss has no KL term."""


def ppo_loss(new: NewOutputs, batch: LossInputs, coefficients: LossCoefficients) -> BatchLoss:
    """Return the PPO loss of a micro-batch, and metrics that add up over micro-batches.

    Args:
        new: outputs of the current policy and critic.
        batch: the experience of the same responses.
    """
    log_probs, mask, minibatch_tokens = new.log_probs, batch.mask, batch.minibatch_tokens
    policy, policy_clipped = policy_losses(
        log_probs, batch.old_log_probs, batch.advantages, coefficients.cliprange, coefficients.cliprange_high
    )
    if batch.token_weights is not None:
        policy = policy * batch.token_weights
    terms, clipped = {"policy": (1.0, policy)}, {"policy": policy_clipped}
    if batch.returns is not None:
        value, clipped["value"] = value_losses(new.values, batch.old_values, batch.returns, coefficients.cliprange_value)
        terms["value"] = (coefficients.vf_coef, value)
    if coefficients.ent_coef:
        terms["entropy"] = (-coefficients.ent_coef, new.entropy)
    if coefficients.kl_estimator:
        terms["kl"] = (coefficients.kl_coef, kl_estimate(log_probs, batch.ref_log_probs, coefficients.kl_estimator))
    means = {name: masked_sum(losses, mask) / minibatch_tokens for name, (_, losses) in terms.items()}
    total = torch.stack([weight * means[name] for name, (weight, _) in terms.items()]).sum()
    with torch.no_grad():
        ratio = torch.exp(log_probs - batch.old_log_probs)
        sums = {
            **{f"loss/{name}": mean for name, mean in means.items()},
            **{f"{name}/clipfrac": (where & mask).sum() / minibatch_tokens for name, where in clipped.items()},
            "ratio/mean": masked_sum(ratio, mask) / minibatch_tokens,
            "ratio/abs_error": masked_sum((ratio - 1).abs(), mask) / minibatch_tokens,
            # Schulman's k3 of the step within the update, old to new.
            "policy/approx_kl": masked_sum(ratio - 1 - torch.log(ratio), mask) / minibatch_tokens,
        }
    return BatchLoss(total, sums)


def critic_loss(values: Tensor, batch: LossInputs, coefficients: LossCoefficients) -> BatchLoss:
    """Return only the value loss of a micro-batch. Arguments are as for `ppo_loss`, with the current values [B, T]."""
    assert batch.returns is not None
    losses, _ = value_losses(values, batch.old_values, batch.returns, coefficients.cliprange_value)
    return BatchLoss(coefficients.vf_coef * masked_sum(losses, batch.mask) / batch.minibatch_tokens)


def policy_losses(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return clipped-ratio losses (Schulman et al. 2017, equation 7) and whether they were clipped; all [B, T].

    Args:
        log_probs: log-probs of the sampled tokens under the current policy.
        old_log_probs: log-probs of the same tokens under the policy before its first step on them.
        cliprange: epsilon; the ratio is clipped to 1 - cliprange and 1 + cliprange.
        cliprange_high: upper epsilon, if it differs (DAPO, arXiv 2503.14476, section 3.1).
    """
    ratio = torch.exp(log_probs - old_log_probs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + (cliprange if cliprange_high is None else cliprange_high))
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Return half of the larger of two squared errors, and whether it is the clipped one; all [B, T].

    The second error uses values clipped to within `cliprange` of the old ones (lm-human-preferences, `train_policy.py`,
    `loss`). With an infinite `cliprange`, both errors are equal.
    """
    # Exact for values within the range, unlike old + difference.
    near = values.clamp(old_values - cliprange, old_values + cliprange)
    unclipped, clipped = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Return per-token estimates of KL(policy || reference) on the policy's samples, shaped like the input.

    With d = log pi - log ref (Schulman 2020, "Approximating KL Divergence"):

    - k1 = d is unbiased and can be negative.
    - k2 = d^2 / 2 is biased and never negative.
    - k3 = exp(-d) - 1 + d is unbiased, never negative, and varies less near 0.

    As a term of the loss, gradients flow through `log_probs`. In expectation, the gradient of k2 is the gradient
    of the KL, and k3 has the gradient of KL(reference || policy). The gradient of k1 is 0, so k1 cannot be a loss.
    """
    d = log_probs - reference
    if estimator == "k1":
        return d
    return 0.5 * d**2 if estimator == "k2" else torch.expm1(-d) + d


class KLController:
    """The coefficient of the KL penalty: constant, or adapted to a target by proportional control.

    The constant is 0.02 in InstructGPT and 0.05 in summarize_from_feedback_details. The controller follows Ziegler et al.
    2019, section 2.2 (`AdaptiveKLController` in lm-human-preferences).

    Args:
        target: target KL, in nats per response. If 0, the coefficient is constant.
        horizon: horizon of the adaptation, in responses.
    """

    def __init__(self, coef: float, target: float = 0.0, horizon: int = 10_000) -> None:
        self.coef, self.target, self.horizon, self.start = coef, target, horizon, coef

    def update(self, kl: float, samples: int) -> None:
        """Raise the coefficient if the KL is above the target, lower it if below, by at most 20 % per horizon of samples.

        Args:
            kl: mean over responses, in nats summed over tokens.
            samples: number of responses.
        """
        if self.target:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)  # a rollout beyond the horizon must not overshoot

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, and the initial coefficient in the settings."""
        return {"coef": self.coef, "start": self.start}

    def load_state_dict(self, state: dict[str, float] | float) -> None:
        """Restore an adapted coefficient, unless `kl_coef` has changed. States of earlier versions are a number."""
        stored = state if isinstance(state, dict) else {"coef": state, "start": self.start}
        if self.target and stored["start"] == self.start:
            self.coef = stored["coef"]
