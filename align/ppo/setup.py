"""The setup of a PPO run: its folder, models, data, engine and sampler."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from align.batches.encoding import Data, Limits, encode_prompts
from align.batches.mixtures import is_given, split_by_opening
from align.batches.streams import examples_digest, require_same_examples
from align.core.errors import UserError, counted
from align.models.backbone import Backbone
from align.models.heads import LanguageModel
from align.models.loading import LoadedModel, vocabulary_rows
from align.models.roles import ActorCritic, Roles
from align.ppo.actor_critic import build_actor_critic, copy_backbone, param_groups
from align.ppo.config import PPOConfig
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.flops import RoleFlopsProfiles, flops_profiles
from align.ppo.given_objects import GivenObjects, attach_callbacks, reference_and_value_model, with_reference_adapter
from align.ppo.records import Experience, RoleOutputs, Rollout
from align.ppo.reward_functions import WeightedFunction
from align.ppo.rewards import Rewards
from align.ppo.rollout import plan_minibatch, prompts_of_update, shuffled_minibatches
from align.ppo.scoring_models import RewardModelLike, RewardSource, load_rewards, make_scorer
from align.reward.checkpoint import require_reward_model
from align.runtime.distributed import max_across_processes, zero_stage
from align.runtime.sharding import full_numel, place_frozen_model, sharded_loading
from align.sampling.engines import SamplingEngine, make_engine, sampling_tokens
from align.sampling.generation import SamplingParams
from align.tokenization.encoded import EncodedPrompt
from align.training.data_order import PLANNED_UPDATES
from align.training.engine import TrainEngine
from align.training.memory import FLOAT32_BYTES
from align.training.optimizer import ParamGroup
from align.training.run import Run
from align.training.start import Model, build_engine, open_run, warn_if_prompts_are_reread


@dataclass(frozen=True)
class PPOSetup:
    """All that the loop needs besides its settings."""

    run: Run
    policy: LoadedModel
    engine: TrainEngine
    """Trains the `ActorCritic`."""
    roles: Roles
    """Policy, reference and critic."""
    sampler: SamplingEngine
    """Samples the responses; `sampling` has its parameters."""
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

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Use the averaged weights for evaluation and saving, if the run averages them."""
        if self.engine.average is None:
            yield
            return
        with self.engine.averaged_weights():
            self.sampler.weights_changed()
            yield
        self.sampler.weights_changed()


def prepare(
    config: PPOConfig,
    model: Model,
    reward_models: Sequence[RewardModelLike],
    functions: Sequence[WeightedFunction],
    prompts: Data,
    validation: Data,
    extensions: list[Extension],
    given: GivenObjects = GivenObjects(),  # noqa: B008  # it is frozen
) -> PPOSetup:
    """Open the run's folder, load all models and data, and build the engines. Raise a UserError for a mistake in either.

    Args:
        model: of the policy; a transformers model needs `given.tokenizer`.
        validation: fixed prompts for evaluations; may be empty.
        given: objects in memory beside the policy.
    """
    reference_is_updated = any(extension.updates_reference for extension in extensions)
    require_rewards(reward_models, functions, extensions)
    run, policy = open_policy(config, model, given, reference_is_updated)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    encoded, held_out = encode_all_prompts(
        prompts, validation, policy, limits, config.validation_split, config.skip_bad_rows
    )
    every_prompt = [*encoded, *held_out]
    # Models: the policy with its critic and all adapters in one module, a reference, and separate reward models.
    with sharded_loading(run.accelerator):
        reference, value_model = reference_and_value_model(
            policy, given, every_prompt, config.max_new_tokens, config.gradient_checkpointing, config.has_critic
        )
    context = training_context(config, run, policy, encoded, every_prompt)
    with sharded_loading(run.accelerator):
        sources = load_rewards(reward_models, policy, config.dtype, config.chat_template)
        for extension in extensions:
            extension.load(context)
        adapters = [source.adapter_on_policy for source in sources if source.adapter_on_policy]
        adapters += [adapter for extension in extensions for adapter in extension.adapters]
        critic_init = (sources[0].adapter_on_policy or sources[0].loaded) if sources else None
        module = build_actor_critic(
            policy,
            critic=config.critic if config.has_critic else "none",
            critic_init=critic_init,
            adapters=adapters,
            with_entropy=config.ent_coef > 0,
            reference_is_updated=reference_is_updated,
            value_model=value_model,
        )
    # Engine and rewards.
    steps = config.num_ppo_epochs * config.num_mini_batches
    value_rate = config.value_learning_rate or config.learning_rate
    groups = param_groups(module, config.learning_rate, value_rate, frozen_steps=config.critic_warmup * steps)
    total_steps = config.total_updates * steps
    engine, roles = build_engine_and_roles(
        run, policy, module, sources, extensions, total_steps, groups, average_decay=config.ema_decay, reference=reference
    )
    scorers = [make_scorer(source, run, policy, roles, every_prompt, config.max_new_tokens) for source in sources]
    rewards = Rewards(scorers, functions, config.reward_ensemble, config.uncertainty_weight, run.accelerator)
    for extension in extensions:
        extension.start(engine, roles)
    if given.callbacks:
        share = config.rollout_batch_size / config.samples_per_prompt / len(encoded)
        attach_callbacks(given.callbacks, run, policy, engine, config.total_updates, share)
    report(config, run, policy, len(encoded), len(held_out), extensions)
    sampler, sampling = build_sampler(config, run, policy, engine, every_prompt)
    profiles = flops_profiles(policy, module, rewards, reference_is_updated, reference)
    return PPOSetup(run, policy, engine, roles, sampler, sampling, rewards, encoded, held_out, profiles, extensions)


def training_context(
    config: PPOConfig, run: Run, policy: LoadedModel, training_prompts: list[EncodedPrompt], prompts: list[EncodedPrompt]
) -> TrainingContext:
    """Return the values that extensions load with; `prompts` has those of training and of evaluations."""
    return TrainingContext(
        run=run,
        policy=policy,
        training_prompts=training_prompts,
        prompts=prompts,
        total_updates=config.total_updates,
        critic_warmup=config.critic_warmup,
        samples_per_prompt=config.samples_per_prompt,
        max_prompt_tokens=config.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        missing_eos_penalty=config.missing_eos_penalty,
        missing_eos_score=config.missing_eos_score,
    )


def open_policy(config: PPOConfig, model: Model, given: GivenObjects, reference_is_updated: bool) -> tuple[Run, LoadedModel]:
    """Open the run's folder, and take or load the policy."""
    if reference_is_updated and given.reference is not None:
        raise UserError("reference_refresh copies the policy into the reference; leave out reference, or set it to 0")
    copies = 0 if given.reference else 2 if reference_is_updated else 1
    run, policy = open_run(config, "ppo", model, given.tokenizer, frozen_copies=copies, peft_config=given.peft_config)
    if isinstance(given.reference, str):
        policy = with_reference_adapter(policy, given.reference)
    return run, policy


def require_rewards(
    models: Sequence[RewardModelLike], functions: Sequence[WeightedFunction], extensions: Sequence[Extension]
) -> None:
    """Raise a UserError for a run without a reward, or with a folder that is not a reward model."""
    if not (models or functions or any(extension.gives_scores for extension in extensions)):
        kinds = "reward_model, reward_functions, rules, rubrics, attributes, or several of them"
        raise UserError(f"PPO needs a reward: set {kinds}")
    for model in models:
        if isinstance(model, str):
            require_reward_model(model)


def encode_all_prompts(
    prompts: Data, validation: Data, policy: LoadedModel, limits: Limits, validation_split: float, skip_bad_rows: bool
) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Return the prompts of training and those of evaluations, which may be a part of the given ones."""
    encoded, split = split_by_opening(encode_prompts(prompts, policy, limits, skip_bad_rows), validation_split)
    return encoded, encode_prompts(validation, policy, limits, skip_bad_rows) if is_given(validation) else split


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
    trained = sum(full_numel(weight) for weight in module.parameters() if weight.requires_grad)
    mean = FLOAT32_BYTES * trained if average_decay else 0
    saved_reference = trained * policy.backbone.model.dtype.itemsize if reference_is_updated else 0  # in checkpoints
    run.print(run.memory.check(module, [*references, *scoring], {"mean of the weights": mean}, mean + saved_reference))
    frozen, initial, *_ = [*(place_frozen_model(model, accelerator) for model in references), None, None]
    engine = build_engine(run, module, total_steps, groups, average_decay)
    return engine, Roles(engine.module, frozen, initial, reference_is_updated)


def report(
    config: PPOConfig, run: Run, policy: LoadedModel, prompts: int, held_out: int, extensions: Sequence[Extension]
) -> None:
    """Print the data that the run trains on; `held_out` counts the prompts of the evaluations."""
    updates, responses = config.total_updates, config.rollout_batch_size
    run.print(f"ppo: {counted(prompts, 'prompt')}, {held_out} held out; model {run.model_config.model}")
    episodes = counted(updates * responses, "episode")
    run.print(f"{counted(updates, 'update')} of {counted(responses, 'response')} ({episodes})")
    warn_if_prompts_are_reread(run, policy.backbone, [config.samples_per_prompt])
    if held_out and config.save_best_policy and not any(extension.selects_by for extension in extensions):
        run.print(
            "the best policy is chosen by the reward that it is trained on; selection.reward_model lets another one choose"
        )


def build_sampler(
    config: PPOConfig, run: Run, policy: LoadedModel, engine: TrainEngine, prompts: Sequence[EncodedPrompt]
) -> tuple[SamplingEngine, SamplingParams]:
    """Return the sampling engine and its parameters: as many responses at once as the smallest process's memory holds.

    Raises:
        UserError: if the model has no token with one of `stop_token_ids`.
    """
    highest, rows = max(config.stop_ids or [0]), vocabulary_rows(policy.backbone.model)
    if highest >= rows:
        raise UserError(f"stop_token_ids: there is no token {highest}; the model has tokens 0 to {rows - 1}")
    longest = max(len(prompt.ids) for prompt in prompts) + config.max_new_tokens
    sampler = make_engine(config, engine, policy, longest)
    at_once = -max_across_processes(-sampling_tokens(run.memory, policy.backbone, longest), run.accelerator)
    return sampler, SamplingParams(config.max_new_tokens, config.temperature, batch_tokens=at_once, stop_ids=config.stop_ids)


def largest_micro_batch(config: PPOConfig, setup: PPOSetup) -> tuple[Experience, list[int], float, int]:
    """Return the micro-batch of this process with the most padded tokens, if all responses have the largest length.

    Returns:
        An experience of zeros, rows of it, the response tokens of their minibatch, and the padded tokens of the rows.
    """
    samples, length, count = config.samples_per_prompt, config.max_new_tokens, config.rollout_batch_size
    backbone, accelerator = setup.policy.backbone, setup.run.accelerator
    found: list[tuple[int, Rollout, list[int], list[int]]] = []
    for update in range(1, min(config.total_updates, PLANNED_UPDATES) + 1):
        prompts = prompts_of_update(setup.prompts, update, count // samples, samples, config.seed)
        rollout = Rollout(prompts, [[0] * length] * count, [], [])
        for minibatch in shuffled_minibatches(count, samples, config.num_mini_batches, update, 0, config.seed):
            for batch in plan_minibatch(rollout, minibatch, backbone, config.micro_batch_tokens, accelerator):
                longest = max(len(prompts[row].ids) for row in batch.rows)
                found.append((batch.group_count * longest + len(batch.rows) * length, rollout, minibatch, batch.rows))
    padded_tokens, rollout, minibatch, rows = max(found, key=lambda batch: batch[0])
    zeros = torch.zeros(count, length)
    old, returns = RoleOutputs(zeros, zeros, zeros, zeros), zeros if config.has_critic else None
    experience = Experience(rollout, zeros[:, 0], old, zeros, returns, config.kl_coef, zeros[:, 0], {})
    return experience, rows, float(length * len(minibatch)), padded_tokens


class PromptIdentity:
    """Recognizes the prompts of a checkpoint, whose order `prompts_of_update` depends on."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self.values = {"examples": len(prompts), "digest": examples_digest(prompt.ids for prompt in prompts)}

    def state_dict(self) -> dict[str, Any]:
        """Return their number and digest."""
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError if a checkpoint has other prompts."""
        require_same_examples("the prompts", state, self.values)


@contextmanager
def save_if_scoring_fails(run: Run, rollout: Rollout, update: int) -> Iterator[None]:
    """Save the rollout if scoring it fails, and add the file to the error: sampling may have taken an hour."""
    try:
        yield
    except UserError as error:
        rows = [
            {"prompt": list(prompt.conversation), "response": text, "ended": ended, "category": prompt.category}
            for prompt, text, ended in zip(rollout.prompts, rollout.texts, rollout.ended, strict=True)
        ]
        run.record("unscored", rows, update)
        raise UserError(f"{error}; the rollout of update {update} is in {run.folder / 'unscored.jsonl'}") from error
