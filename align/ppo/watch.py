"""Checks during PPO: a negative KL, and a reward that rises while text quality falls."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from align.core.errors import UserError

PATIENCE = 5
"""Updates in a row with a KL clearly below 0 (2 standard errors) before the run stops: by chance 1 run in 10 million."""


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

    def state(self) -> int:
        """For the checkpoint."""
        return self.count

    def load_state(self, state: int) -> None:
        """Restore what `state` returned."""
        self.count = state


class MissingEosWatch:
    """Warns once if the score that replaces that of a response that did not end is above the others' mean.

    A reward model's level is arbitrary unless it is centered: where its scores are far below the replacement, running
    into the limit pays.

    Args:
        replacement: the score of a response that did not end; None if that is not the same for all.
    """

    def __init__(self, replacement: float | None) -> None:
        self.replacement = replacement

    def check(self, scores: Tensor, ended: Tensor) -> str:
        """Take a rollout into account.

        Args:
            scores: [B] to learn from.
            ended: [B] bool.

        Returns:
            The warning; "" if there is none.
        """
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
        """Warnings after an evaluation; metrics are named as in docs/metrics.md, without their prefix."""
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

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint."""
        return self.first

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned."""
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
        """Take an evaluation into account.

        Args:
            metrics: named as in docs/metrics.md, without their prefix; without a `judge` nothing is checked.

        Returns:
            Why the run should stop; "" if it should not.
        """
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

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"count": self.count, "best": self.best}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.count, self.best = state["count"], state["best"]
