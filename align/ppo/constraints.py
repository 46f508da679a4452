"""A reward under constraints, as a Lagrangian; imports only torch."""

import math

from torch import Tensor


def lagrangian_scores(preference: Tensor, costs: Tensor, multipliers: Tensor) -> Tensor:
    """Scores [B] (preference - sum of multiplier x cost) / (1 + sum of multipliers).

    The division keeps the scale of scores constant while multipliers grow.

    Args:
        preference: [B].
        costs: [R, B] of R constraints.
        multipliers: [R], 0 or more.

    Source: Dai et al. 2023, "Safe RLHF" (arXiv 2310.12773), appendix B, for one constraint.
    """
    return (preference - (multipliers[:, None] * costs).sum(0)) / (1 + multipliers.sum())


def next_multiplier(multiplier: float, cost: float, budget: float, rate: float, limit: float) -> float:
    """A multiplier after a rollout: larger while the mean cost is above its budget, smaller below.

    ln(multiplier) moves by rate x multiplier x (cost - budget), so that it stays above 0 (Dai et al. 2023, equation 31).

    Args:
        limit: the largest multiplier.
    """
    return min(limit, multiplier * math.exp(min(rate * multiplier * (cost - budget), 1.0)))


def damped_multiplier(multiplier: float, cost: float, budget: float, damping: float, limit: float) -> float:
    """The multiplier that a rollout is scored with: `multiplier` x e^(damping x (cost - budget)), at most `limit`.

    A multiplier alone sums up what was exceeded before, so it goes on rising until the cost is far below the budget, and
    both swing. A part that follows the cost of the moment damps this, as the proportional term of a PID controller does
    (Stooke et al. 2020, "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods", arXiv 2007.03964, which
    adds it; here it multiplies, as in `next_multiplier`).

    Args:
        cost: mean of the rollout that is scored.
    """
    return min(limit, multiplier * math.exp(damping * (cost - budget)))
