"""The FLOPs of an update, by role and phase."""

from collections.abc import Sequence
from typing import NamedTuple

from align.batches.micro_batches import prompt_groups
from align.models.backbone import Backbone, flops_profile
from align.models.loading import LoadedModel
from align.models.roles import ActorCritic
from align.ppo.records import Rollout
from align.reward.scoring import RewardModelScorer
from align.runtime.flops import FlopsProfile, forward_flops, sampling_flops, training_flops


class RoleFlopsProfiles(NamedTuple):
    """FLOPs profile of each role. The reference has the policy's shape, without its adapter."""

    policy: FlopsProfile
    reference: FlopsProfile
    critic: FlopsProfile | None = None
    """None for a head on the policy's trunk."""
    rewards: tuple[FlopsProfile, ...] = ()


def flops_profiles(
    policy: LoadedModel,
    module: ActorCritic,
    scorers: Sequence[RewardModelScorer],
    reference: Backbone | None = None,
) -> RoleFlopsProfiles:
    """Return the FLOPs profile of each role.

    Args:
        reference: separate reference model. Default: the initial policy.
    """
    critic = module.critic or (policy.backbone if module.critic_adapter else None)
    critic_profile = flops_profile(critic, module.critic_adapter) if critic else None
    scoring = tuple(scorer.flops_profile for scorer in scorers)
    if not module.trains_critic:  # a frozen reward model as critic costs another forward pass
        scoring += scoring[:1] if module.has_trunk_for_values else ()
        critic_profile = None
    return RoleFlopsProfiles(
        policy=flops_profile(policy.backbone, policy.adapter),
        reference=flops_profile(reference or policy.backbone, None if reference else module.reference_adapter),
        critic=critic_profile,
        rewards=scoring,
    )


def rollout_lengths(rollout: Rollout, backbone: Backbone, budget: int) -> list[tuple[int, list[int]]]:
    """Return the number of tokens of each prompt, in micro-batches of `budget` tokens, and of its responses in the row."""
    prompts = [prompt.ids for prompt in rollout.prompts]
    groups = prompt_groups(backbone, prompts, rollout.responses, range(len(rollout)), budget)
    return [(len(prompts[rows[0]]), [len(rollout.responses[row]) for row in rows]) for rows in groups]


def phase_flops(
    profiles: RoleFlopsProfiles, lengths: Sequence[tuple[int, Sequence[int]]], epochs: float, critic_epochs: float = 0.0
) -> dict[str, float]:
    """Return the FLOPs of one update in each of its phases: sampling, scoring, learning.

    Args:
        lengths: number of tokens of each prompt and of its responses.
        epochs: number of passes that train policy and critic.
        critic_epochs: further passes that train only the critic. With a shared trunk they are forward passes.
    """
    sampling = scoring = learning = 0.0
    for prompt, responses in lengths:
        predicted = sum(responses)
        sampling += sampling_flops(profiles.policy, prompt, responses)
        language_models = (profiles.policy, profiles.reference)
        scoring += sum(forward_flops(role, prompt, responses, predicted) for role in language_models)
        scoring += sum(forward_flops(role, prompt, responses) for role in (profiles.critic, *profiles.rewards) if role)
        learning += epochs * training_flops(profiles.policy, prompt, responses, predicted)
        if profiles.critic:
            learning += (epochs + critic_epochs) * training_flops(profiles.critic, prompt, responses)
        else:
            learning += critic_epochs * forward_flops(profiles.policy, prompt, responses)
    return {"sampling": sampling, "scoring": scoring, "learning": learning}
