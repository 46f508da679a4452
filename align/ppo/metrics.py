"""Metrics of a rollout; docs/metrics.md defines each."""

from collections.abc import Sequence

from torch import Tensor

from align.core.tensor_ops import masked_mean
from align.ppo.experience import Experience, engine_metrics
from align.ppo.kl import kl_estimates
from align.ppo.rollout import Rollout


def repetition(ids: Sequence[int], n: int = 3) -> float:
    """Share of a response's n-grams of tokens that occurred before in it; 0 for a response shorter than n."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def text_metrics(rollout: Rollout) -> dict[str, float]:
    """Mean length, share of responses that ended by themselves, and mean repetition."""
    count = len(rollout)
    return {
        "length": sum(map(len, rollout.responses)) / count,
        "ended": sum(rollout.ended) / count,
        "repetition": sum(map(repetition, rollout.responses)) / count,
    }


def response_kl(experience: Experience) -> Tensor:
    """k1 estimates [B] of the KL to the reference, in nats per response."""
    k1, _ = kl_estimates(experience.role_outputs.log_probs, experience.role_outputs.reference)
    return (k1 * experience.mask).sum(1)


def value_metrics(experience: Experience) -> dict[str, float]:
    """How well the critic predicts returns; empty without a critic."""
    if experience.returns is None:
        return {}
    returns, mask = experience.returns, experience.mask
    residual = masked_mean((returns - experience.role_outputs.values) ** 2, mask)
    variance = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
    return {"value/explained_variance": float(1 - residual / variance.clamp(min=1e-8))}


def rollout_metrics(
    experience: Experience, scores: Tensor, parts: dict[str, Tensor], importance_cap: float = 0.0
) -> dict[str, float]:
    """All metrics of a rollout.

    Args:
        scores: [B] on the scale of the rewards.
        parts: each reward [B] by its name.
        importance_cap: largest importance weight that corrects for a separate engine; 0: no correction.

    Raises:
        UserError: if the engine that sampled is too far from the policy.
    """
    roles, mask = experience.role_outputs, experience.mask
    kl = response_kl(experience)
    start = {} if roles.start is None else {"kl/start": float(((roles.log_probs - roles.start) * mask).sum(1).mean())}
    k3 = (kl_estimates(roles.log_probs, roles.reference)[1] * mask).sum(1)
    return {
        **value_metrics(experience),
        **engine_metrics(experience, importance_cap),
        **{f"reward/{name}": float(values.mean()) for name, values in parts.items()},
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(correction=0)),
        "objective": float((experience.scores - experience.beta * kl).mean()),
        "kl/k1": float(kl.mean()),
        "kl/k3": float(k3.mean()),
        **start,
        "kl/beta": experience.beta,
        "entropy": float(masked_mean(roles.entropy, mask)),
        **{f"text/{name}": value for name, value in text_metrics(experience.rollout).items()},
    }
