"""What a person would watch for during PPO: the wrong sign of KL, and reward that parts from the text's quality."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from align.errors import UserError

PATIENCE = 5
"""Updates in a row with a negative KL before the run stops: chance gives that to 1 run in 10 million at 2 deviations."""


class NegativeKLWatch:
    """Stops a run whose measured KL stays below 0, which a true KL cannot be.

    The cause is always that responses were not drawn from the distribution that is scored (TRL issues 351, 925, 1161).
    """

    def __init__(self) -> None:
        self.count = 0

    def check(self, kl: Tensor) -> None:
        """Look at the k1 estimates [B] of one rollout, summed over tokens.

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


class Drift:
    """Compares evaluations with the first one and says when reward rose while the text changed for the worse."""

    def __init__(self, first: Mapping[str, float] | None = None) -> None:
        self.first = dict(first) if first else None

    def check(self, figures: Mapping[str, float]) -> list[str]:
        """What to warn of after an evaluation; figures are named as in docs/metrics.md, without their prefix."""
        if self.first is None:
            self.first = dict(figures)
            return []
        first, said = self.first, []
        if figures["reward"] <= first["reward"]:
            return []
        growth = figures["length"] / max(first["length"], 1e-9)
        if growth > 1.5 or growth < 0.5:
            said.append(f"responses went from {first['length']:.0f} to {figures['length']:.0f} tokens")
        if figures["repetition"] > first["repetition"] + 0.1:
            said.append(f"repeated trigrams went from {first['repetition']:.0%} to {figures['repetition']:.0%}")
        if figures["ended"] < first["ended"] - 0.2:
            said.append(f"responses that end by themselves went from {first['ended']:.0%} to {figures['ended']:.0%}")
        return said

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint."""
        return self.first
