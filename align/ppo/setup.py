"""The preparation of a PPO run: which model has which role, how much memory they need, and what scores responses."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate import Accelerator
from torch import nn

from align.core.errors import UserError, counted
from align.core.settings import ModelConfig
from align.models.adapters import copy_adapter
from align.models.backbone import Backbone, flops_profile, is_prefix_lm, wrap
from align.models.heads import LanguageModel, RewardModel, ScalarHead, freeze_unused_lm_head
from align.models.loading import LoadedModel, vocabulary_rows
from align.models.roles import REFERENCE_ADAPTER, VALUE_ADAPTER, ActorCritic, Roles
from align.ppo.extensions import Extension
from align.ppo.metrics import RoleFlopsProfiles
from align.ppo.records import Rollout
from align.ppo.reward_functions import WeightedFunction
from align.ppo.rewards import Rewards
from align.ppo.rollout import plan_minibatch
from align.ppo.scoring_models import RewardAdapter, RewardModelLike, RewardSource
from align.reward.checkpoint import LoadedReward, require_reward_model
from align.reward.scoring import reads_ids_of
from align.runtime.distributed import max_across_processes, zero_stage
from align.runtime.sharding import full_numel, is_sharded, place_frozen_model, sharded_copies, sharded_loading
from align.sampling.engines import SamplingEngine, sampling_tokens
from align.sampling.generation import SamplingParams
from align.tokenization.encoded import EncodedPrompt
from align.training.engine import TrainEngine
from align.training.memory import FLOAT32_BYTES
from align.training.optimizer import ParamGroup
from align.training.run import Run
from align.training.start import build_engine, warn_if_prompts_are_reread


@dataclass(frozen=True)
class PPOSetup:
    """All that the loop needs besides its settings."""

    run: Run
    policy: LoadedModel
    engine: TrainEngine
    """Trains the `ActorCritic`."""
    roles: Roles
    sampler: SamplingEngine
    sampling: SamplingParams
    rewards: Rewards
    prompts: list[EncodedPrompt]
    validation: list[EncodedPrompt]
    """The fixed prompts of evaluations; may be empty."""
    flops_profiles: RoleFlopsProfiles
    extensions: list[Extension]

    def close(self) -> None:
        """Release the resources of the sampler and the run."""
        self.sampler.close()
        self.run.close()


def require_reward(
    models: Sequence[RewardModelLike], functions: Sequence[WeightedFunction], extensions: Sequence[Extension]
) -> None:
    """Raise a UserError for a run without a reward, or with a reward model that is none."""
    if not (models or functions or any(extension.gives_scores for extension in extensions)):
        kinds = "reward_model, reward_functions, rules, rubrics, attributes, or several of them"
        raise UserError(f"PPO needs a reward: set {kinds}")
    for model in models:
        if isinstance(model, str):
            require_reward_model(model)


def build_engine_and_roles(
    run: Run,
    policy: LoadedModel,
    module: ActorCritic,
    sources: Sequence[RewardSource],
    extensions: Sequence[Extension],
    total_steps: int,
    groups: Sequence[ParamGroup],
    average_decay: float = 0.0,
    reference: Backbone | None = None,
) -> tuple[TrainEngine, Roles]:
    """Copy the policy for its reference, check that memory suffices, and build the engine around the trained module.

    Args:
        sources: the reward models.
        total_steps: optimizer steps of the run.
        groups: learning rates.
        average_decay: of an exponential mean of the weights that evaluations and the result use; 0: none.
        reference: a model that takes the place of the copy.
    """
    accelerator = run.accelerator
    reference_is_updated = any(extension.updates_reference for extension in extensions)
    if reference_is_updated and zero_stage(accelerator) == 3:
        raise UserError("reference_refresh is not possible under ZeRO-3, which shards the weights: use ZeRO-1 or 2")
    copies = 0 if policy.adapter or reference else 2 if reference_is_updated else 1
    with sharded_loading(accelerator):
        references = [LanguageModel(copy_backbone(policy.backbone)) for _ in range(copies)]
    references += [LanguageModel(reference)] if reference else []
    scoring: list[nn.Module] = [source.loaded.model for source in sources if source.loaded]
    scoring += [model for extension in extensions for model in extension.modules]
    assert isinstance(run.config, ModelConfig)
    trained = sum(full_numel(weight) for weight in module.parameters() if weight.requires_grad)
    mean = FLOAT32_BYTES * trained if average_decay else 0
    moved = trained * policy.backbone.model.dtype.itemsize if reference_is_updated else 0  # the reference, in checkpoints
    run.print(run.memory.check(run.config, module, [*references, *scoring], {"mean of the weights": mean}, mean + moved))
    frozen, initial, *_ = [*(place_frozen_model(model, accelerator) for model in references), None, None]
    engine = build_engine(run, module, total_steps, groups, average_decay)
    return engine, Roles(engine.module, frozen, initial, reference_is_updated)


def flops_profiles(
    policy: LoadedModel, module: ActorCritic, rewards: Rewards, reference_is_updated: bool, reference: Backbone | None = None
) -> RoleFlopsProfiles:
    """Return the profile of each role, on which its FLOPs depend.

    Args:
        reference: a model that takes the place of the policy's copy.
    """
    critic = module.critic or (policy.backbone if module.critic_adapter else None)
    return RoleFlopsProfiles(
        policy=flops_profile(policy.backbone, policy.adapter),
        reference=flops_profile(reference or policy.backbone, None if reference else module.reference_adapter),
        initial=flops_profile(policy.backbone, policy.initial_adapter) if reference_is_updated else None,
        critic=flops_profile(critic, module.critic_adapter) if critic else None,
        rewards=rewards.flops_profiles,
    )


def report(
    run: Run, policy: LoadedModel, prompts: int, held_out: int, sizes: tuple[int, int, int], selected_by_reward: bool
) -> None:
    """Print the data that the run trains on.

    Args:
        held_out: prompts of the evaluations.
        sizes: updates, responses of one update, and responses to each prompt.
        selected_by_reward: whether the reward selects the policy that is kept.
    """
    assert isinstance(run.config, ModelConfig)
    updates, responses, samples = sizes
    run.print(f"ppo: {counted(prompts, 'prompt')}, {held_out} held out; model {run.config.model}")
    episodes = counted(updates * responses, "episode")
    run.print(f"{counted(updates, 'update')} of {counted(responses, 'response')} ({episodes})")
    warn_if_prompts_are_reread(run, policy.backbone, [samples])
    if held_out and selected_by_reward:
        run.print(
            "the best policy is chosen by the reward that it is trained on; selection.reward_model lets another one choose"
        )


def sampling_of(
    run: Run,
    policy: LoadedModel,
    longest: int,
    max_new_tokens: int,
    temperature: float,
    stop_ids: frozenset[int] | None = None,
) -> SamplingParams:
    """Return how responses are sampled: as many at once as the memory of the smallest process holds.

    Args:
        longest: tokens of the longest prompt and response together.
        stop_ids: see `SamplingParams`.

    Raises:
        UserError: if the model has no token with one of the ids.
    """
    highest, rows = max(stop_ids or [0]), vocabulary_rows(policy.backbone.model)
    if highest >= rows:
        raise UserError(f"stop_token_ids: there is no token {highest}; the model has tokens 0 to {rows - 1}")
    at_once = -max_across_processes(-sampling_tokens(run.memory, policy.backbone, longest), run.accelerator)
    return SamplingParams(max_new_tokens, temperature, batch_tokens=at_once, stop_ids=stop_ids)


def largest_micro_batch(
    plans: Iterable[tuple[Rollout, list[list[int]]]], backbone: Backbone, micro_batch_tokens: int, accelerator: Accelerator
) -> tuple[int, Rollout, list[int], list[int]]:
    """Return the micro-batch of this process with the most padded tokens: tokens, rollout, rows of its minibatch, its rows.

    Args:
        plans: rollouts with the rows of their minibatches.
    """
    found: list[tuple[int, Rollout, list[int], list[int]]] = []
    for rollout, minibatches in plans:
        for minibatch in minibatches:
            for batch in plan_minibatch(rollout, minibatch, backbone, micro_batch_tokens, accelerator):
                groups = len(getattr(batch.rows, "starts", batch.rows))
                prompt = max(len(rollout.prompts[row].ids) for row in batch.rows)
                response = max(len(rollout.responses[row]) for row in batch.rows)
                found.append((groups * prompt + len(batch.rows) * response, rollout, minibatch, batch.rows))
    return max(found, key=lambda batch: batch[0])


def build_actor_critic(
    policy: LoadedModel,
    critic: Literal["none", "shared", "separate"] = "shared",
    critic_init: RewardAdapter | LoadedReward | None = None,
    adapters: Sequence[RewardAdapter] = (),
    with_entropy: bool = False,
    reference_is_updated: bool = False,
    value_model: tuple[Backbone, ScalarHead] | None = None,
) -> ActorCritic:
    """Build the module that PPO trains.

    A separate critic starts from the reward model (InstructGPT, section 3.5) if the reward model is an adapter on the
    policy's base. If all weights are trained, it does if the reward model has the policy's architecture and reads its
    token ids. Otherwise it starts
    from the initial policy, with a head that starts at 0.

    Args:
        critic: `shared`: a head on the policy's trunk; `separate`: a model, or with LoRA an adapter, for values alone.
        critic_init: the reward model that a separate critic may start from.
        adapters: reward models on the policy's base.
        with_entropy: whether the loss has a term for the policy's entropy.
        reference_is_updated: whether the reference follows the policy.
        value_model: a model with its head that becomes the critic in place of any other.
    """
    backbone, hidden_size = policy.backbone, policy.backbone.hidden_size
    value_head = ScalarHead(hidden_size, start_at_zero=True).requires_grad_(critic != "none")
    model, critic_adapter = None, None
    if value_model:
        model, value_head = value_model
        model.requires_grad_(True)
        value_head.requires_grad_(True)
        freeze_unused_lm_head(model)
    elif critic == "separate" and policy.adapter:
        assert backbone.peft is not None
        reward_adapter = critic_init if isinstance(critic_init, RewardAdapter) else None
        copy_adapter(backbone.peft, reward_adapter.adapter if reward_adapter else policy.adapter, VALUE_ADAPTER)
        critic_adapter = VALUE_ADAPTER
        if reward_adapter:
            _start_from(reward_adapter.head, reward_adapter.mean, value_head)
        backbone.peft.set_requires_grad(policy.adapter)  # adding one adapter must not freeze the other
    elif critic == "separate":
        reward = critic_init if isinstance(critic_init, LoadedReward) else None
        model = _critic_from_reward(policy, reward, value_head) or copy_backbone(backbone)
        model.requires_grad_(True)
        freeze_unused_lm_head(model)
    reference_adapter = _reference_adapter(policy) if reference_is_updated and policy.adapter else None
    heads = {adapter.adapter: adapter.head for adapter in adapters}
    parts = (backbone, policy.adapter, value_head, policy.initial_adapter, model, critic_adapter, heads)
    return ActorCritic(*parts, with_entropy=with_entropy, reference_adapter=reference_adapter)


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


def param_groups(
    module: ActorCritic, learning_rate: float, value_learning_rate: float, frozen_steps: int
) -> list[ParamGroup]:
    """Return the learning rates of policy and critic.

    A trunk that both share is the policy's: the value loss moves it at the policy's rate.

    Args:
        frozen_steps: first optimizer steps during which the policy's rate is 0.
    """
    critic = module.critic_weights()
    policy = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad) - critic
    return [ParamGroup("", policy, learning_rate, frozen_steps), ParamGroup("value", critic, value_learning_rate)]


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
