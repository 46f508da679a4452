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


def update_flops(roles: RoleShapes, work: Sequence[tuple[int, Sequence[int]]], epochs: int) -> float:
    """FLOPs of one update.

    Args:
        work: tokens of each prompt that is read, and of its responses.
        epochs: passes of learning.
    """
    total = 0.0
    for prompt, responses in work:
        said = sum(responses)
        total += sampling(roles.policy, prompt, responses)
        total += sum(reading(role, prompt, responses, said) for role in (roles.policy, roles.reference))
        total += sum(reading(role, prompt, responses) for role in (roles.critic, roles.reward) if role)
        total += epochs * learning(roles.policy, prompt, responses, said)
        total += epochs * learning(roles.critic, prompt, responses) if roles.critic else 0.0
    return total
