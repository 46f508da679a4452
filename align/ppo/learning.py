"""The loss of PPO on the rows of one micro-batch, and the check that scoring and training agree."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from align.core.errors import UserError
from align.core.tensor_ops import masked_sum
from align.models.roles import Roles
from align.ppo.config import PPOConfig
from align.ppo.experience import Experience, pack_rollout
from align.ppo.kl import kl_losses
from align.ppo.objective import policy_losses, value_losses
from align.training.optimization import Sums

EXACT_RATIO_TOLERANCE = 1e-4
"""On a processor the same kernels see the same shapes in scoring and in training: the ratio is 1 but for rounding."""
RATIO_WARNING, RATIO_LIMIT = 1e-3, 0.05
"""On a GPU, kernels may differ between the pass without and the pass with gradients. A mean ratio error of 0.001 in
bfloat16 is worth a warning; one of 0.05 is a quarter of the usual clip range and means that something else is wrong."""


def loss_of_minibatch(
    config: PPOConfig, experience: Experience, rows: list[int], roles: Roles, device: torch.device
) -> Callable[[list[int]], tuple[Tensor, Sums]]:
    """The PPO loss of a minibatch, as a function of the rows of one micro-batch; means are over the minibatch's tokens."""
    count = float(experience.lengths[rows].sum())

    def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
        prompt, response, prompt_index = pack_rollout(experience.rollout, part, device)
        width, mask = response.ids.shape[1], response.mask()

        def columns(values: Tensor) -> Tensor:
            return values[part, :width].to(device)

        new = roles.policy(prompt, response, config.temperature, prompt_index)
        old_log_probs, old_values = columns(experience.role_outputs.log_probs), columns(experience.role_outputs.values)
        clips = (config.clip, config.clip_high or None, config.dual_clip or math.inf)
        policy, clipped = policy_losses(new.log_probs, old_log_probs, columns(experience.advantages), *clips)
        if experience.importance is not None:
            policy = policy * columns(experience.importance)
        terms, was_clipped = {"policy": (1.0, policy)}, {"policy": clipped}
        if experience.returns is not None:
            value, was_clipped["value"] = value_losses(
                new.values, old_values, columns(experience.returns), config.value_clip or math.inf
            )
            terms["value"] = (config.value_weight, value)
        if config.entropy_weight:
            terms["entropy"] = (-config.entropy_weight, new.entropy)
        if config.kl_penalty != "reward":
            reference = columns(experience.role_outputs.reference)
            terms["kl"] = (experience.beta, kl_losses(new.log_probs, reference, config.kl_penalty))
        means = {name: masked_sum(losses, mask) / count for name, (_, losses) in terms.items()}
        total = torch.stack([weight * means[name] for name, (weight, _) in terms.items()]).sum()
        with torch.no_grad():
            ratio = torch.exp(new.log_probs - old_log_probs)
            sums = {
                **{f"{name}_loss": mean for name, mean in means.items()},
                **{f"clipped/{name}": (where & mask).sum() / count for name, where in was_clipped.items()},
                "ratio/mean": masked_sum(ratio, mask) / count,
                "ratio_error": masked_sum((ratio - 1).abs(), mask) / count,
                # Schulman's k3 of the step within the update, old to new.
                "kl/step": masked_sum(ratio - 1 - torch.log(ratio), mask) / count,
            }
        return total, sums

    return loss_of_rows


def check_ratio(error: float, device: torch.device) -> str:
    """Check the ratio at the first minibatch of a fresh rollout, before anything was learned from it: it must be 1.

    Args:
        error: mean of |ratio - 1| over tokens.
        device: where it was computed.

    Returns:
        A warning; "" if there is none.

    Raises:
        UserError: if scoring and training do not agree.
    """
    exact = device.type == "cpu"
    problem = (
        f"the ratio at the first minibatch of a fresh rollout is off by {error:.2g} on average, not 1: the model computes "
        "different log-probs in training and in scoring (check for dropout and nondeterministic kernels)"
    )
    if not error <= (EXACT_RATIO_TOLERANCE if exact else RATIO_LIMIT):
        raise UserError(problem)
    return f"warning: {problem}" if error > RATIO_WARNING and not exact else ""
