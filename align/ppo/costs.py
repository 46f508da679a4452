"""Model FLOPs of a PPO update: sampling, scoring and learning, added up over the roles."""

from collections.abc import Sequence
from typing import NamedTuple

from align.flops import Shape, learning, reading, sampling


class RoleShapes(NamedTuple):
    """What each role's cost depends on; the reference has the policy's shape, without its adapter."""

    policy: Shape
    reference: Shape
    critic: Shape | None = None
    """None: a head on the policy's trunk."""
    reward: Shape | None = None
    """None: functions alone."""


def update_flops(roles: RoleShapes, rows: Sequence[tuple[int, int]], epochs: int) -> float:
    """FLOPs of one update.

    Args:
        rows: prompt and response tokens of each row of the rollout.
        epochs: passes of learning.
    """
    total = 0.0
    for prompt, response in rows:
        total += sampling(roles.policy, prompt, response)
        total += sum(reading(role, prompt, [response], response) for role in (roles.policy, roles.reference))
        total += sum(reading(role, prompt, [response]) for role in (roles.critic, roles.reward) if role)
        total += epochs * learning(roles.policy, prompt, [response], response)
        total += epochs * learning(roles.critic, prompt, [response]) if roles.critic else 0.0
    return total
