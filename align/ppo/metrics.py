"""Metrics of an update, checks that stop or warn, and the FLOPs of an update; docs/metrics.md defines each metric."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from align.core.errors import UserError
from align.core.tensor_ops import masked_mean
from align.ppo.experience import Experience
from align.ppo.losses import kl_estimates
from align.ppo.rollout import Rollout
from align.runtime.flops import FlopsProfile, forward_flops, sampling_flops, training_flops

MISMATCH_LIMIT = 0.1
"""Nats per token. bfloat16 and other kernels cause a hundredth of it or less; another model or temperature, far more."""
PATIENCE = 5
"""Updates in a row with a KL clearly below 0 (2 standard errors) before the run stops: by chance 1 run in 10 million."""


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


def engine_metrics(experience: Experience, cap: float) -> dict[str, float]:
    """Mismatch between the sampling engine and the policy; empty if they are the same model.

    Args:
        cap: largest importance weight that corrects for it; 0: no correction.

    Raises:
        UserError: if the mismatch is larger than number formats and kernels can cause, and nothing corrects for it.
    """
    engine_log_probs, mask = experience.rollout.engine_log_probs, experience.mask
    if engine_log_probs is None:
        return {}
    mismatch = float(masked_mean(kl_estimates(engine_log_probs, experience.role_outputs.log_probs)[1], mask))
    if experience.importance is not None:
        weights = experience.importance
        capped = masked_mean((weights >= cap * (1 - 1e-6)).float(), mask)
        figures = {"sampling/importance": float(masked_mean(weights, mask)), "sampling/capped": float(capped)}
        return {"sampling/mismatch": mismatch, **figures}
    if not mismatch <= MISMATCH_LIMIT:
        raise UserError(
            f"the engine samples from a different distribution than the policy ({mismatch:.2g} nats per token): does it "
            "serve the policy's architecture and configuration, and does it report log-probs at the sampling temperature "
            "(--logprobs-mode processed_logprobs)? If that is intended, as with quantized weights, importance_cap 2 "
            "corrects for it"
        )
    return {"sampling/mismatch": mismatch}


def rollout_metrics(
    experience: Experience, scores: Tensor, parts: dict[str, Tensor], importance_cap: float = 0.0
) -> dict[str, float]:
    """All metrics of a rollout.

    Args:
        scores: [B] on the scale of the rewards.
        parts: each reward [B] by its name.

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


class NegativeKLWatch:
    """Stops a run whose measured KL stays below 0, which a true KL cannot be.

    The cause is always that responses were not drawn from the distribution that is scored (TRL issues 351, 925, 1161).
    """

    def __init__(self) -> None:
        self.count = 0

    def check(self, kl: Tensor) -> None:
        """Check the k1 estimates [B] of one rollout, summed over tokens.

        Raises:
            UserError: after `PATIENCE` updates in a row clearly below 0.
        """
        error = float(kl.std(correction=0)) / math.sqrt(len(kl))
        below = float(kl.mean()) < -2 * error - 1e-3
        self.count = self.count + 1 if below else 0
        if self.count >= PATIENCE:
            raise UserError(
                f"KL to the reference was negative {PATIENCE} updates in a row (now {float(kl.mean()):.3f}): responses are "
                "not sampled from the distribution that is scored; look for truncated sampling, another temperature, or "
                "dropout that is on"
            )

    def state_dict(self) -> int:
        """For the checkpoint."""
        return self.count

    def load_state_dict(self, state: int) -> None:
        """Restore what `state_dict` returned."""
        self.count = state


class MissingEosWatch:
    """Warns once if the score that replaces that of truncated responses is above the mean of the complete ones.

    The level of a reward model is arbitrary unless it is centered. If its scores are far below the replacement, running into
    the limit pays.

    Args:
        replacement: the score of truncated responses; None if it is not replaced.
    """

    def __init__(self, replacement: float | None) -> None:
        self.replacement = replacement

    def check(self, scores: Tensor, ended: Tensor) -> str:
        """Return the warning for scores [B] to learn from, `ended` [B] where complete; "" if there is none."""
        if self.replacement is None or not ended.any():
            return ""
        replacement, mean = self.replacement, float(scores[ended].mean())
        if mean >= replacement:
            return ""
        self.replacement = None
        return (
            f"warning: responses that end have a mean score of {mean:.3g}, and one that does not gets {replacement:.3g} "
            "(missing_eos replace): running into the limit is rewarded. Set missing_eos lower, normalize_scores "
            "standardize, or a lower missing_eos_score"
        )


class DriftWatch:
    """Compares evaluations with the first one, and warns if reward rose while the text got worse."""

    def __init__(self, first: Mapping[str, float] | None = None) -> None:
        self.first = dict(first) if first else None

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings after an evaluation, whose metrics are named as in docs/metrics.md without their prefix."""
        if self.first is None:
            self.first = dict(metrics)
            return []
        first, warnings = self.first, []
        if metrics["reward"] <= first["reward"]:
            return []
        growth = metrics["length"] / max(first["length"], 1e-9)
        if growth > 1.5 or growth < 0.5:
            warnings.append(f"responses went from {first['length']:.0f} to {metrics['length']:.0f} tokens")
        if metrics["repetition"] > first["repetition"] + 0.1:
            warnings.append(f"repeated trigrams went from {first['repetition']:.0%} to {metrics['repetition']:.0%}")
        if metrics["ended"] < first["ended"] - 0.2:
            warnings.append(f"responses that end by themselves went from {first['ended']:.0%} to {metrics['ended']:.0%}")
        return warnings

    def state_dict(self) -> dict[str, Any] | None:
        """For the checkpoint."""
        return self.first

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned."""
        self.first = state


class OveroptimizationWatch:
    """Detects a reward that keeps rising after the judge's best evaluation while the judge falls (Gao et al. 2022).

    An evaluation counts if the judge is below its best so far and the reward above what it was there.

    Args:
        patience: evaluations in a row that must count before the run stops; 0: it never does.
    """

    def __init__(self, patience: int) -> None:
        self.patience, self.count = patience, 0
        self.best: dict[str, float] | None = None

    @property
    def reached(self) -> bool:
        """Whether the run should stop."""
        return 0 < self.patience <= self.count

    def check(self, update: int, metrics: Mapping[str, float]) -> str:
        """Why the run should stop after an evaluation; "" if it should not, or if `metrics` has no `judge`."""
        if "judge" not in metrics:
            return ""
        if self.best is None or metrics["judge"] >= self.best["judge"]:
            self.best, self.count = {**metrics, "update": update}, 0
            return ""
        best = self.best
        self.count = self.count + 1 if metrics["reward"] > best["reward"] else 0
        if not self.reached:
            return ""
        points = [
            f"update {point['update']:.0f} (KL {point['kl']:.3g} nats per response, {point['kl_per_token']:.3g} per token)"
            for point in (best, {**metrics, "update": update})
        ]
        return (
            f"stopped: from {points[0]} to {points[1]} the reward rose from {best['reward']:.3g} to {metrics['reward']:.3g} "
            f"and the judge fell from {best['judge']:.3g} to {metrics['judge']:.3g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"count": self.count, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.best = state["count"], state["best"]


class RoleFlopsProfiles(NamedTuple):
    """What each role's cost depends on; the reference has the policy's shape, without its adapter."""

    policy: FlopsProfile
    reference: FlopsProfile
    critic: FlopsProfile | None = None
    """None: a head on the policy's trunk."""
    rewards: tuple[FlopsProfile, ...] = ()
    rules: FlopsProfile | None = None
    rule_lengths: tuple[int, ...] = ()
    """Tokens of each rule that the rule model reads after a response."""
    start: FlopsProfile | None = None
    """None: the starting model is the reference."""


def phase_flops(roles: RoleFlopsProfiles, work: Sequence[tuple[int, Sequence[int]]], epochs: int) -> dict[str, float]:
    """FLOPs of one update in each of its phases: sampling, scoring, learning.

    Args:
        work: tokens of each prompt that is read, and of its responses.
        epochs: passes of learning.
    """
    sampling = scoring = learning = 0.0
    for prompt, responses in work:
        predicted = sum(responses)
        sampling += sampling_flops(roles.policy, prompt, responses)
        language_models = [role for role in (roles.policy, roles.reference, roles.start) if role]
        scoring += sum(forward_flops(role, prompt, responses, predicted) for role in language_models)
        scoring += sum(forward_flops(role, prompt, responses) for role in (roles.critic, *roles.rewards) if role)
        if roles.rules is not None:
            scoring += sum(forward_flops(roles.rules, prompt + length, roles.rule_lengths) for length in responses)
        learning += epochs * training_flops(roles.policy, prompt, responses, predicted)
        learning += epochs * training_flops(roles.critic, prompt, responses) if roles.critic else 0.0
    return {"sampling": sampling, "scoring": scoring, "learning": learning}
