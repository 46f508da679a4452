"""The module that PPO trains: policy, critic and the adapters of other roles on one backbone."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from align.core.errors import UserError
from align.models.adapters import adapter_parameters, copy_adapter
from align.models.backbone import Backbone, is_prefix_lm, wrap
from align.models.heads import RewardModel, ScalarHead, ValueHead
from align.models.loading import LoadedModel, freeze_unused_lm_head
from align.models.roles import VALUE_ADAPTER, ActorCritic
from align.models.vocabulary import vocabulary_rows
from align.ppo.scoring_models import RewardAdapter
from align.reward.checkpoint import LoadedReward
from align.reward.scoring import reads_ids_of
from align.runtime.sharding import is_sharded, sharded_copies
from align.training.optimizer import ParamGroup

Critic = Literal["none", "shared", "separate", "reward"]
ValueFit = Literal["none", "first", "every"]
POLICY_GROUP, VALUE_GROUP = "", "value"
"""Names of the parameter groups, each with a learning rate."""


def build_actor_critic(
    policy: LoadedModel,
    critic: Critic = "shared",
    critic_init: RewardAdapter | LoadedReward | None = None,
    adapters: Sequence[RewardAdapter] = (),
    with_entropy: bool = False,
    value_model: tuple[Backbone, ScalarHead] | None = None,
    value_fit: ValueFit = "none",
) -> ActorCritic:
    """Build the module that PPO trains.

    A separate critic starts from the reward model (InstructGPT, section 3.5) if the reward model is an adapter on the
    policy's base. If all weights are trained, it does if the reward model has the policy's model type, in any size, and
    reads its token ids. Otherwise it starts from the initial policy, with a head that starts at 0.

    Args:
        critic: `shared`: a head on the policy's trunk; `separate`: a model, or with LoRA an adapter, only for values;
            `reward`: a head on the frozen reward model, fitted only by `ValueRegression`.
        critic_init: reward model from which a separate critic may start.
        adapters: reward models on the policy's base.
        with_entropy: whether the loss has a term for the policy's entropy.
        value_model: model and head to use as the critic, overriding `critic`.
        value_fit: rollouts on which `ValueRegression` fits the head. A fitted head starts at 0, also on a reward model.
            A head that is fitted on every rollout is not trained by gradients.
    """
    if value_model:
        parts = CriticParts(head=value_model[1], model=value_model[0])  # weights that the caller froze stay frozen
        freeze_unused_lm_head(value_model[0])
    elif critic == "reward":
        parts = _frozen_reward_critic(policy, critic_init)
    elif critic == "separate":
        parts = _separate_critic(policy, critic_init, starts_from_head=value_fit == "none")
    else:
        parts = CriticParts(head=ValueHead(policy.backbone.hidden_size))
    if not value_model and (critic in ("none", "reward") or value_fit == "every"):
        parts.head.requires_grad_(False)
    trains_trunk = critic == "separate" or value_model is not None
    return ActorCritic(
        policy.backbone,
        policy.adapter,
        parts.head,
        reference_adapter=policy.initial_adapter,
        critic=parts.model,
        frozen_critic=parts.frozen_model,
        trains_critic=trains_trunk or parts.head.linear.weight.requires_grad,
        critic_adapter=parts.adapter,
        reward_heads={adapter.adapter: adapter.head for adapter in adapters},
        with_entropy=with_entropy,
    )


@dataclass
class CriticParts:
    """A critic: its head, and a trunk other than the policy's."""

    head: ScalarHead
    model: Backbone | None = None
    """A trunk whose weights are trained."""
    frozen_model: Backbone | None = None
    adapter: str | None = None
    """An adapter on the policy's base."""


def _frozen_reward_critic(policy: LoadedModel, reward: RewardAdapter | LoadedReward | None) -> CriticParts:
    """Return a new head on a frozen reward model."""
    if isinstance(reward, RewardAdapter):
        return CriticParts(ValueHead(policy.backbone.hidden_size), adapter=reward.adapter)
    source = source_of_values(reward, policy) if reward else None
    if source is None:
        raise UserError("critic: reward needs a reward model with the policy's model type and token ids; use shared")
    return CriticParts(ValueHead(source.backbone.hidden_size), frozen_model=source.backbone)


def _separate_critic(
    policy: LoadedModel, critic_init: RewardAdapter | LoadedReward | None, starts_from_head: bool
) -> CriticParts:
    """Return a trained model, or with LoRA an adapter, that starts from the reward model or else from the policy.

    Args:
        starts_from_head: whether to copy the reward model's head, too.
    """
    backbone = policy.backbone
    head: ScalarHead = ValueHead(backbone.hidden_size)
    if policy.adapter:
        assert backbone.peft is not None
        reward_adapter = critic_init if isinstance(critic_init, RewardAdapter) else None
        copy_adapter(backbone.peft, reward_adapter.adapter if reward_adapter else policy.adapter, VALUE_ADAPTER)
        if reward_adapter and starts_from_head:
            _start_from(reward_adapter.head, reward_adapter.mean, head)
        backbone.peft.set_requires_grad(policy.adapter)  # adding one adapter must not freeze the other
        return CriticParts(head, adapter=VALUE_ADAPTER)
    if isinstance(critic_init, LoadedReward) and (source := source_of_values(critic_init, policy)):
        model, head = _copy_with_settings_of(backbone, source.backbone), ValueHead(source.backbone.hidden_size)
        if starts_from_head:
            _start_from(source.head, critic_init.mean, head)
    else:
        model = copy_backbone(backbone)
    model.recomputes = backbone.recomputes
    model.requires_grad_(True)
    freeze_unused_lm_head(model)
    return CriticParts(head, model=model)


def _copy_with_settings_of(policy: Backbone, source: Backbone) -> Backbone:
    """Return a copy of a frozen reward model that builds masks as the policy does."""
    model = copy_backbone(source)
    kernels = {backbone.model.config._attn_implementation for backbone in (policy, model)}
    model.block_attention = policy.block_attention and len(kernels) == 1
    return model


def source_of_values(reward: LoadedReward, policy: LoadedModel) -> RewardModel | None:
    """Return a reward's model if the critic can start from it: it has the policy's kind and accepts all sampled ids."""
    if not isinstance(reward.model, RewardModel):
        return None
    model, own = policy.backbone.model, reward.loaded.backbone.model
    alike = model.config.model_type == own.config.model_type and is_prefix_lm(model.config) == is_prefix_lm(own.config)
    reads = alike and reads_ids_of(reward, policy.tokenization) and vocabulary_rows(own) >= vocabulary_rows(model)
    return reward.model if reads else None


@torch.no_grad()
def _start_from(reward_head: ScalarHead, mean: float, value_head: ScalarHead) -> None:
    """Initialize values to rewards minus their mean over demonstrations."""
    value_head.linear.weight.copy_(reward_head.linear.weight)
    assert value_head.linear.bias is not None
    value_head.linear.bias.fill_(-mean)


def critic_weights(module: ActorCritic) -> frozenset[str]:
    """Return the names of the trained weights that only values use."""
    adapter = adapter_parameters(module, module.critic_adapter) if module.critic_adapter else {}
    return frozenset(
        name
        for name, weight in module.named_parameters()
        if weight.requires_grad and (name.startswith(("value_head.", "critic.")) or name in adapter)
    )


def param_groups(
    module: ActorCritic, learning_rate: float, value_learning_rate: float, frozen_steps: int
) -> list[ParamGroup]:
    """Return the learning rates of policy and critic.

    A shared trunk belongs to the policy: the value loss updates it at the policy's rate.

    Args:
        frozen_steps: number of first optimizer steps with learning rate 0 for the policy.
    """
    critic = critic_weights(module)
    policy = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad) - critic
    return [
        ParamGroup(POLICY_GROUP, policy, learning_rate, frozen_steps),
        ParamGroup(VALUE_GROUP, critic, value_learning_rate),
    ]


def copy_backbone(backbone: Backbone) -> Backbone:
    """Copy the model with its weights."""
    sharded = {id(weight): weight for weight in backbone.model.parameters() if is_sharded(weight)}
    copies = sharded_copies(list(sharded.values()))
    # deepcopy treats objects in its memo as already copied.
    copied = wrap(copy.deepcopy(backbone.model, dict(zip(sharded, copies, strict=True))), check=False)
    copied.shares_prompts, copied.block_attention = backbone.shares_prompts, backbone.block_attention
    return copied
