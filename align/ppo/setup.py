"""The models of a PPO run: which model has which role, and how much memory they need."""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from align.models.adapters import adapter_parameters, copy_adapter
from align.models.backbone import Backbone, is_prefix_lm, wrap
from align.models.loading import LoadedModel
from align.models.roles import REFERENCE_ADAPTER, VALUE_ADAPTER, ActorCritic, RewardModel, ScalarHead, freeze_unused_lm_head
from align.ppo.config import PPOConfig
from align.ppo.experience import Experience, RoleOutputs, minibatches, plan_minibatch
from align.ppo.rollout import Rollout, prompts_of_update
from align.ppo.scoring_models import RewardAdapter
from align.reward.checkpoint import LoadedReward
from align.reward.scoring import reads_ids_of
from align.runtime.sharding import is_sharded, sharded_copies, whole_count
from align.tokenization.encoded import EncodedPrompt
from align.training.memory import FLOAT32_BYTES
from align.training.optimizer import RateGroup
from align.training.run import Run
from align.training.trial import PLANNED_UPDATES


def check_memory(run: Run, config: PPOConfig, loaded: LoadedModel, module: ActorCritic, frozen: Sequence[nn.Module]) -> None:
    """Report the memory that the run holds whatever its batches are. Raises: UserError if it is more than there is."""
    trained = sum(whole_count(weight) for weight in module.parameters() if weight.requires_grad)
    mean = FLOAT32_BYTES * trained if config.ema_decay else 0
    moved = trained * loaded.backbone.model.dtype.itemsize if config.reference_refresh else 0
    run.say(run.memory.check(config, module, frozen, {"mean of the weights": mean}, mean + moved))


class LargestMicroBatch(NamedTuple):
    """The micro-batch of a run with the most tokens, if every response has its maximum length."""

    experience: Experience
    minibatch: list[int]
    """The rows of its minibatch in the experience."""
    rows: list[int]
    tokens: int
    """Padded tokens of the micro-batch."""


def largest_micro_batch(
    config: PPOConfig, backbone: Backbone, prompts: list[EncodedPrompt], accelerator: Accelerator
) -> LargestMicroBatch:
    """Find the largest micro-batch of this process; its responses, advantages and role outputs are 0."""
    found: list[tuple[int, Rollout, list[int], list[int]]] = []
    for update in range(1, min(config.updates, PLANNED_UPDATES) + 1):
        chosen = prompts_of_update(config, prompts, update)
        rollout = Rollout(chosen, [[0] * config.max_new_tokens] * len(chosen), [], [])
        for minibatch in minibatches(config, rollout, update, 0):
            for batch in plan_minibatch(config, rollout, minibatch, backbone, accelerator):
                groups = len(getattr(batch.rows, "starts", batch.rows))
                prompt = max(len(chosen[row].ids) for row in batch.rows)
                tokens = groups * prompt + len(batch.rows) * config.max_new_tokens
                found.append((tokens, rollout, minibatch, batch.rows))
    tokens, rollout, minibatch, rows = max(found, key=lambda batch: batch[0])
    zeros = torch.zeros(len(rollout), config.max_new_tokens)
    returns = zeros if config.has_critic else None
    outputs = RoleOutputs(zeros, zeros, zeros, zeros)
    experience = Experience(rollout, zeros[:, 0], outputs, rollout.lengths, zeros, returns, config.kl_beta)
    return LargestMicroBatch(experience, minibatch, rows, tokens)


def build_actor_critic(
    config: PPOConfig,
    loaded: LoadedModel,
    mounted: Sequence[RewardAdapter] = (),
    critic_start: RewardAdapter | None = None,
    reward: LoadedReward | None = None,
) -> ActorCritic:
    """The module that PPO trains.

    A separate critic starts from the reward model (InstructGPT, section 3.5) if that is an adapter on the policy's base, or
    if all weights are trained, it has the policy's architecture and it reads the policy's token ids. Otherwise it starts
    from the initial policy, with a head that starts at 0.

    Args:
        mounted: reward models on the policy's base.
        critic_start: the one of them that a critic may start from.
        reward: the first reward model, if that is a separate model.
    """
    backbone, hidden_size = loaded.backbone, loaded.backbone.hidden_size
    value_head = ScalarHead(hidden_size, start_at_zero=True).requires_grad_(config.has_critic)
    critic, critic_adapter = None, None
    if config.critic == "separate" and loaded.adapter:
        assert backbone.peft is not None
        copy_adapter(backbone.peft, critic_start.adapter if critic_start else loaded.adapter, VALUE_ADAPTER)
        critic_adapter = VALUE_ADAPTER
        if critic_start:
            _start_from(critic_start.head, critic_start.mean, value_head)
        backbone.peft.set_requires_grad(loaded.adapter)  # adding one adapter must not freeze the other
    elif config.critic == "separate":
        critic = _critic_from_reward(loaded, reward, value_head) or copy_backbone(backbone)
        critic.requires_grad_(True)
    if critic is not None:
        freeze_unused_lm_head(critic)
    reference_adapter = _reference_adapter(loaded) if config.reference_refresh and loaded.adapter else None
    heads = {reward.adapter: reward.head for reward in mounted}
    parts = (backbone, loaded.adapter, value_head, loaded.start_adapter, critic, critic_adapter, heads)
    return ActorCritic(*parts, learns_entropy=config.entropy_weight > 0, reference_adapter=reference_adapter)


def _reference_adapter(loaded: LoadedModel) -> str:
    """Add a frozen copy of the policy's adapter for the reference; returns its name."""
    assert loaded.backbone.peft is not None
    assert loaded.adapter is not None
    trained = [weight for weight in loaded.backbone.model.parameters() if weight.requires_grad]
    copy_adapter(loaded.backbone.peft, loaded.adapter, REFERENCE_ADAPTER)
    loaded.backbone.model.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    return REFERENCE_ADAPTER


def rate_groups(config: PPOConfig, module: ActorCritic) -> list[RateGroup]:
    """The learning rates of critic and policy; the policy's is 0 during `critic_warmup`.

    A trunk that both share is the policy's: the value loss moves it at the policy's rate.
    """
    critic = module.critic_weights()
    policy = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad) - critic
    frozen_steps = config.critic_warmup * config.epochs * config.minibatches
    return [
        RateGroup("", policy, config.learning_rate, frozen_steps),
        RateGroup("value", critic, config.value_learning_rate or config.learning_rate),
    ]


def _critic_from_reward(loaded: LoadedModel, reward: LoadedReward | None, value_head: ScalarHead) -> Backbone | None:
    """A copy of the reward model's backbone, and its head in `value_head`; None if values cannot start from it."""
    if reward is None or not isinstance(reward.model, RewardModel):
        return None
    policy, own = loaded.backbone.model.config, reward.loaded.backbone.model.config
    alike = policy.model_type == own.model_type and policy.hidden_size == own.hidden_size
    if not alike or is_prefix_lm(policy) != is_prefix_lm(own) or not reads_ids_of(reward, loaded.tokenization):
        return None
    _start_from(reward.model.head, reward.mean, value_head)
    return copy_backbone(reward.model.backbone)


@torch.no_grad()
def _start_from(reward_head: ScalarHead, mean: float, value_head: ScalarHead) -> None:
    """Let values start as rewards minus their mean over demonstrations."""
    value_head.linear.weight.copy_(reward_head.linear.weight)
    assert value_head.linear.bias is not None
    value_head.linear.bias.fill_(-mean)


def copy_backbone(backbone: Backbone) -> Backbone:
    """A copy of the model with its weights."""
    sharded = {id(weight): weight for weight in backbone.model.parameters() if is_sharded(weight)}
    copies = sharded_copies(list(sharded.values()))
    # deepcopy takes what it finds in its memo for copied already.
    copied = wrap(copy.deepcopy(backbone.model, dict(zip(sharded, copies, strict=True))), check=False)
    copied.shares_prompts = backbone.shares_prompts
    return copied


class ReferenceRefresh:
    """Copies the policy's weights over the reference's.

    Args:
        every: updates between two refreshes.
        loaded: the policy.
        reference: the frozen copy; None with LoRA, where the reference is another adapter on the policy's base.
    """

    def __init__(self, every: int, loaded: LoadedModel, reference: nn.Module | None) -> None:
        self.every, self.moved = every, False
        if reference is None:
            assert loaded.adapter is not None
            self.weights = adapter_parameters(loaded.backbone.model, REFERENCE_ADAPTER)
            trained = adapter_parameters(loaded.backbone.model, loaded.adapter).values()
            self.sources = dict(zip(self.weights, trained, strict=True))
        else:
            self.weights = {name.removeprefix("backbone.model."): weight for name, weight in reference.named_parameters()}
            policy = dict(loaded.backbone.model.named_parameters())
            self.sources = {name: policy[name] for name in self.weights}

    def after_update(self, update: int) -> None:
        """Refresh the reference, if it is its turn after this update."""
        if update % self.every == 0:
            self._copy(self.sources)

    @torch.no_grad()
    def _copy(self, sources: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(sources[name])
        self.moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """The reference's weights; none while it is the starting model."""
        return {name: weight.detach() for name, weight in self.weights.items()} if self.moved else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the reference of a checkpoint."""
        if state:
            self._copy(state)
