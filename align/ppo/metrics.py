"""Metrics of an update, and checks that stop or warn; docs/metrics.md defines each metric."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from align.core.errors import UserError
from align.core.tensor_ops import masked_mean
from align.ppo.losses import KLEstimator, kl_estimate
from align.ppo.records import Experience, Rollout

MISMATCH_LIMIT = 0.1
"""In nats per token. bfloat16 and other kernels cause at most a hundredth of it; another model or temperature, far more."""
EXACT_RATIO_TOLERANCE = 1e-4
"""On a CPU, scoring and training run the same kernels on the same shapes, so the ratio is 1 up to rounding."""
RATIO_WARNING, RATIO_LIMIT = 1e-3, 0.05
"""On a GPU, kernels may differ between forward passes with and without gradients. A mean ratio error of 0.001 in bfloat16
deserves a warning. An error of 0.05, a quarter of the usual clip range, has another cause."""
TRL_NAMES = {"objective/scores": "reward/mean", "objective/kl": "kl/k1", "objective/rlhf_reward": "reward/kl_penalized"}
"""Metrics that are also logged under the names of TRL's PPOTrainer, for existing dashboards and scripts."""
PATIENCE = 5
"""Consecutive updates with a KL clearly below 0 (2 standard errors) before the run stops. By chance: 1 run in 10 million."""


def repetition(ids: Sequence[int], n: int = 3) -> float:
    """Return the fraction of a response's token n-grams that occurred earlier in it; 0 for a response shorter than n."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def mean_and_error(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of values [B] and its standard error."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {name: float(values.mean()), f"{name}_error": error}


def response_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the mean length, the fraction of responses with an end token, and the mean repetition."""
    count = len(rollout)
    return {
        "length": sum(map(len, rollout.responses)) / count,
        "eos_rate": sum(rollout.ended) / count,
        "repetition": sum(map(repetition, rollout.responses)) / count,
    }


def response_kl(experience: Experience, estimator: KLEstimator = "k1") -> Tensor:
    """Return estimates [B] of the KL to the reference, in nats per response."""
    kl = kl_estimate(experience.old.log_probs, experience.old.ref_log_probs, estimator)
    return (kl * experience.mask).sum(1)


def value_metrics(experience: Experience) -> dict[str, float]:
    """Return the critic's loss, explained variance and calibration. Empty without a critic.

    The calibration is the slope of the least-squares line of returns over values: 1 for unbiased values, below 1 for values
    that vary too much.
    """
    if experience.returns is None:
        return {}
    returns, values, mask = experience.returns, experience.old.values, experience.mask
    return_deviation, value_deviation = (each - masked_mean(each, mask) for each in (returns, values))
    residual = masked_mean((returns - values) ** 2, mask)
    variance = masked_mean(return_deviation**2, mask)
    value_variance = masked_mean(value_deviation**2, mask)
    covariance = masked_mean(return_deviation * value_deviation, mask)
    return {
        "value/loss": 0.5 * float(residual),
        "value/explained_variance": float(1 - residual / variance.clamp(min=1e-8)),
        "value/calibration": float(covariance / value_variance) if value_variance > 1e-8 else 0.0,
    }


def engine_metrics(experience: Experience) -> dict[str, float]:
    """Return the mismatch between the sampling engine and the policy. Empty if they are the same model.

    Raises:
        UserError: if the mismatch exceeds `MISMATCH_LIMIT` and token weights do not correct for it.
    """
    engine_log_probs, mask = experience.rollout.engine_log_probs, experience.mask
    if engine_log_probs is None:
        return {}
    mismatch = float(masked_mean(kl_estimate(engine_log_probs, experience.old.log_probs, "k3"), mask))
    if not experience.signal.corrects_sampling and not mismatch <= MISMATCH_LIMIT:
        raise UserError(
            f"the engine samples from a different distribution than the policy ({mismatch:.2g} nats per token): does it "
            "serve the policy's architecture and configuration, and does it report log-probs at the sampling temperature "
            "(--logprobs-mode processed_logprobs)? If that is intended, as with quantized weights, vllm.importance_cap 2 "
            "corrects for it"
        )
    return {"sampling/engine_kl": mismatch}


def rollout_metrics(experience: Experience, penalty: KLEstimator | None) -> dict[str, float]:
    """Return all metrics of a rollout. Raises: see `engine_metrics`.

    Args:
        penalty: estimator of the KL penalty in the reward. If None, the reward has no KL penalty.
    """
    old, mask, scores = experience.old, experience.mask, experience.scores
    kl = response_kl(experience)
    k3 = response_kl(experience, "k3")
    penalties = experience.kl_coef * response_kl(experience, penalty) if penalty else 0.0
    metrics = {
        **value_metrics(experience),
        **engine_metrics(experience),
        **{f"reward/{name}": float(values.mean()) for name, values in experience.signal.components.items()},
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(correction=0)),
        "reward/kl_penalized": float((experience.signal.scores - penalties).mean()),
        "kl/k1": float(kl.mean()),
        "kl/k3": float(k3.mean()),
        "kl/coef": experience.kl_coef,
        "entropy": float(masked_mean(old.entropy, mask)),
        **{f"response/{name}": value for name, value in response_metrics(experience.rollout).items()},
    }
    return metrics | {name: metrics[ours] for name, ours in TRL_NAMES.items()}


def check_ratio(error: float, device: torch.device) -> str:
    """Check that the ratio at the first minibatch of a fresh rollout is 1. Return a warning or "".

    Args:
        error: mean of |ratio - 1| over tokens.

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


class NegativeKLWatch:
    """Stops a run whose measured KL stays below 0, which a true KL cannot be.

    The cause is always that responses were not drawn from the distribution that is scored (TRL issues 351, 925, 1161).
    """

    def __init__(self) -> None:
        self.count = 0

    def check(self, kl: Tensor) -> None:
        """Check the k1 estimates [B] of one rollout, summed over tokens.

        Raises:
            UserError: if the KL was clearly below 0 in `PATIENCE` consecutive updates.
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
        """Return the count."""
        return self.count

    def load_state_dict(self, state: int) -> None:
        """Restore the state returned by `state_dict`."""
        self.count = state


UPDATES_WITHOUT_END = 3


class MissingEosWatch:
    """Warns once if the replacement score of truncated responses hides the reward or exceeds it.

    It hides the reward if no response ends. The scores of a reward model are arbitrary up to a constant unless it is
    centered. If they are far below the replacement, running into the length limit is rewarded.

    Args:
        replacement: score assigned to truncated responses, or None to keep their own scores.
    """

    def __init__(self, replacement: float | None) -> None:
        self.replacement, self.without_end, self.some_end = replacement, 0, False

    def check(self, scores: Tensor, ended: Tensor) -> str:
        """Return a warning for the training scores [B], with `ended` [B] true if complete; "" if there is none."""
        if self.replacement is None:
            return ""
        if not ended.any():
            self.without_end += 1
            if self.some_end or self.without_end != UPDATES_WITHOUT_END:
                return ""
            return (
                f"warning: no response ended in {UPDATES_WITHOUT_END} updates: each score is {self.replacement:.3g}, "
                "whatever the reward (missing_eos_score). Raise max_new_tokens, or set missing_eos_score none"
            )
        self.some_end = True
        replacement, mean = self.replacement, float(scores[ended].mean())
        if mean >= replacement:
            return ""
        self.replacement = None
        return (
            f"warning: responses that end have a mean score of {mean:.3g}, and one that does not gets {replacement:.3g} "
            "(missing_eos_score): running into the limit is rewarded. Set a lower missing_eos_score, or missing_eos_penalty"
        )


CRITIC_PATIENCE = 3
"""Consecutive updates with a negative explained variance before the warning."""
COLLAPSE_ERRORS, COLLAPSE_PATIENCE = 4.0, 5
"""A run stops after 5 consecutive updates with a mean score 4 standard errors below the first rollout's mean."""
STEP_KL_WARNING = 2.0
"""Growth of the KL to the reference in one update that triggers the warning, in nats per response."""


class CollapseWatch:
    """Warns at the first signs that updates degrade the policy, and stops a run whose policy has lost its reward.

    Args:
        stops: whether to stop the run instead of only warning.
    """

    def __init__(self, stops: bool = True) -> None:
        self.stops = stops
        self.first: list[float] | None = None
        """Mean and standard error of the scores of the first rollout."""
        self.kl = 0.0
        self.unexplained = self.alike = self.worse = 0
        self.warned: list[str] = []

    def check(self, metrics: Mapping[str, float], scores: Tensor, samples: int) -> list[str]:
        """Return the warnings for an update, each once per run.

        Args:
            metrics: metrics of the update, as in docs/metrics.md.
            scores: [B] scores of its rollout on the scale of the rewards (`Experience.scores`).
            samples: number of adjacent scores that belong to one prompt.

        Raises:
            UserError: if the policy has collapsed.
        """
        kl, explained = metrics["kl/k1"], metrics.get("value/explained_variance", 0.0)
        growth, self.kl = kl - self.kl, kl
        mean, error = mean_and_error(
            "score", scores.float().view(-1, samples).mean(1)
        ).values()  # samples of a prompt are alike
        self.first = self.first or [mean, error]
        is_alike = float(scores.std(correction=0)) <= 1e-3 * max(1.0, abs(mean))
        is_worse = kl > 0 and self.first[0] - mean > COLLAPSE_ERRORS * math.hypot(self.first[1], error)
        self.unexplained = self.unexplained + 1 if explained < 0 else 0
        self.alike = self.alike + 1 if is_alike else 0
        self.worse = self.worse + 1 if is_worse else 0
        fell = (
            f"the mean score fell from {self.first[0]:.3g} to {mean:.3g}, by more than {COLLAPSE_ERRORS:.0f} standard errors"
        )
        if self.stops and self.worse >= COLLAPSE_PATIENCE:
            raise UserError(f"{fell}, and stayed there for {COLLAPSE_PATIENCE} updates: the policy has collapsed")
        signs = {
            "critic": self.unexplained >= CRITIC_PATIENCE,
            "kl": growth > STEP_KL_WARNING,
            "alike": self.alike >= CRITIC_PATIENCE,
            "worse": is_worse,
        }
        lines = {
            "critic": f"the explained variance was negative for {CRITIC_PATIENCE} updates (now {explained:.2f}): the critic "
            "adds noise: raise rollout_batch_size or critic_warmup, or lower value_learning_rate",
            "kl": f"one update moved the policy by {growth:.1f} nats per response: lower learning_rate, num_ppo_epochs or "
            "max_update_kl, or raise rollout_batch_size",
            "alike": f"all scores of a rollout were alike (now {mean:.3g}) for {CRITIC_PATIENCE} updates: nothing to "
            "learn from: check the reward",
            "worse": f"{fell}: lower learning_rate or num_ppo_epochs",
        }
        new = [name for name, is_seen in signs.items() if is_seen and name not in self.warned]
        self.warned += new
        return [f"warning: {lines[name]}" for name in new]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, the first scores and the warnings given."""
        return {name: value for name, value in vars(self).items() if name != "stops"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        vars(self).update(state)


class DriftWatch:
    """Compares each evaluation with the first one, and warns if the reward rose while the text got worse."""

    def __init__(self, first: Mapping[str, float] | None = None) -> None:
        self.first = dict(first) if first else None

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the warnings for an evaluation. Metrics are named as in docs/metrics.md, without their prefix."""
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
        if metrics["eos_rate"] < first["eos_rate"] - 0.2:
            warnings.append(
                f"responses that end by themselves went from {first['eos_rate']:.0%} to {metrics['eos_rate']:.0%}"
            )
        return warnings

    def state_dict(self) -> dict[str, Any] | None:
        """Return the first evaluation."""
        return self.first

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the state returned by `state_dict`."""
        self.first = state
