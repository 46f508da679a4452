"""Model FLOPs of a PPO update: sampling, scoring and learning, added up over the roles."""

from collections.abc import Sequence
from typing import NamedTuple

from align.runtime.flops import FlopsProfile, forward_flops, sampling_flops, training_flops


class RoleFlopsProfiles(NamedTuple):
    """What each role's cost depends on; the reference has the policy's shape, without its adapter."""

    policy: FlopsProfile
    reference: FlopsProfile
    critic: FlopsProfile | None = None
    """None: a head on the policy's trunk."""
    rewards: tuple[FlopsProfile, ...] = ()
    """One of each reward model."""
    rules: FlopsProfile | None = None
    """The shape of the rule model."""
    rule_lengths: tuple[int, ...] = ()
    """Tokens of each rule that it reads after a response."""
    start: FlopsProfile | None = None
    """None: the starting model is the reference."""


def update_flops(roles: RoleFlopsProfiles, work: Sequence[tuple[int, Sequence[int]]], epochs: int) -> float:
    """FLOPs of one update; arguments as for `phase_flops`."""
    return sum(phase_flops(roles, work, epochs).values())


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
