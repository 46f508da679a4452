"""The metrics of an update under TRL's names."""

from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Literal

from align.core.tensor_ops import masked_mean
from align.ppo.losses import kl_estimate
from align.ppo.records import Experience

STEP_METRICS = {
    "policy/approxkl_avg": "policy/approx_kl",
    "policy/clipfrac_avg": "policy/clipfrac",
    "loss/policy_avg": "loss/policy",
    "loss/value_avg": "loss/value",
    "val/clipfrac_avg": "value/clipfrac",
    "val/ratio": "ratio/mean",
}
"""TRL's names of metrics of an optimizer step, and this library's."""


def rollout_metrics_of_trl(
    experience: Experience, kl_coef: float, kl_estimator: Literal["k1", "k3"], eos_token_id: int | None
) -> dict[str, float]:
    """Return the metrics of a rollout: means over responses of sums over their tokens, as in TRL.

    `policy/entropy_avg` is the mean over response tokens of the policy that wrote them.
    """
    old, mask = experience.old, experience.mask
    kl = float((kl_estimate(old.log_probs, old.ref_log_probs, kl_estimator) * mask).sum(1).mean())
    score = float(experience.training_scores.mean())
    return {
        "objective/kl": kl,
        "objective/entropy": float(-(old.log_probs * mask).sum(1).mean()),
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": score - kl_coef * kl,
        "objective/scores": score,
        "policy/entropy_avg": float(masked_mean(old.entropy, mask)),
        "val/num_eos_tokens": sum(token == eos_token_id for ids in experience.rollout.responses for token in ids),
    }


def step_metrics_of_trl(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over optimizer steps, and the unbiased variance of the steps' mean ratios (0 for a single step)."""
    metrics = {name: fmean(step[ours] for step in steps) for name, ours in STEP_METRICS.items()}
    ratios = [step["ratio/mean"] for step in steps]
    return metrics | {"val/ratio_var": variance(ratios) if len(ratios) > 1 else 0.0}
