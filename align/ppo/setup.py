"""The setup of a PPO run: its folder, models, data, engine and sampler."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from accelerate import Accelerator
from torch import nn

from align.batches.encoding import Limits, encode_prompts
from align.batches.mixtures import is_given, split_by_opening
from align.core.errors import UserError, counted
from align.models.backbone import Backbone
from align.models.heads import LanguageModel, ValueHead
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER, ActorCritic, Roles
from align.models.vocabulary import vocabulary_rows
from align.ppo.actor_critic import Critic, build_actor_critic, copy_backbone, param_groups
from align.ppo.config import PPOConfig
from align.ppo.extensions import Extension, Extensions, TrainingContext
from align.ppo.flops import RoleFlopsProfiles, flops_profiles
from align.ppo.inputs import PPOInputs, reference_and_value_model, with_reference_adapter
from align.ppo.records import Experience, RoleOutputs, Rollout
from align.ppo.rewards import Rewards
from align.ppo.rollout import plan_minibatch, prompts_of_update, shuffled_minibatches
from align.ppo.scoring_models import RewardSource, load_source, make_scorer
from align.ppo.value_regression import ValueRegression
from align.reward.checkpoint import require_reward_model
from align.runtime.distributed import max_across_processes, zero_stage
from align.runtime.sharding import full_numel, place_frozen_model, sharded_loading
from align.sampling.engines import SamplingEngine, make_engine, sampling_tokens
from align.sampling.generation import SamplingParams
from align.sampling.settings import EngineConfig
from align.tokenization.encoded import EncodedPrompt
from align.training.checkpoint import Stateful
from align.training.data_order import PLANNED_UPDATES, examples_digest, require_same_examples
from align.training.engine import TrainEngine
from align.training.memory import FLOAT32_BYTES
from align.training.optimizer import ParamGroup
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.start import build_engine, warn_if_prompts_are_reread

if TYPE_CHECKING:
    from align.training.callbacks import TrainerCallbacks


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
    extensions: Extensions
    card: dict[str, str]
    """The lines of the model card that do not change during training."""
    value_regression: ValueRegression | None = None
    """Fits the value head; None: gradients alone train it."""

    def stateful(self) -> dict[str, Stateful]:
        """Return the stateful objects of the setup by their names in a checkpoint."""
        own = {extension.name: extension for extension in self.extensions if extension.has_state}
        critic = {"value_regression": self.value_regression} if self.value_regression else {}
        return {"prompts": PromptIdentity(self.prompts), **critic, **own}

    def __enter__(self) -> Self:
        self.run.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.sampler.close()
        finally:
            self.run.__exit__(kind, error, trace)

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


@making_trainer()
def prepare(config: PPOConfig, inputs: PPOInputs) -> PPOSetup:
    """Open the run's folder, load all models and data, and build the engines. Raise a UserError for a mistake in them."""
    extensions = inputs.extensions
    require_rewards(inputs)
    follows = any(each.updates_reference for each in extensions)
    if follows and inputs.reference is not None:
        raise UserError("reference_refresh copies the policy into the reference; leave out reference, or set it to 0")
    run = Run(inputs.policy.settings(config), "ppo")
    loaded = inputs.policy.load(run, frozen_copies=0 if inputs.reference else 1 + follows)
    policy = with_reference_adapter(loaded, inputs.reference)
    policy.tokenization.stop_ids = config.stop_ids or frozenset()
    samples, length, updates = config.samples_per_prompt, config.max_new_tokens, config.total_updates
    limits = Limits(config.max_prompt_tokens, length, config.overlong)
    given = encode_prompts(inputs.prompts, policy, limits, config.skip_bad_rows)
    encoded, held_out = split_by_opening(given, config.validation_split)
    if is_given(inputs.validation):
        held_out = encode_prompts(inputs.validation, policy, limits, config.skip_bad_rows)
    every_prompt = [*encoded, *held_out]
    # Models: the policy with its critic and all adapters in one module, a reference, and separate reward models.
    critic: Critic = config.critic if config.has_critic else "none"
    sizes = (updates, config.critic_warmup, samples, config.max_prompt_tokens, length)
    missing_eos = (config.missing_eos_penalty, config.missing_eos_score)
    context = TrainingContext(run, policy, encoded, every_prompt, *sizes, *missing_eos)
    with sharded_loading(run.accelerator):
        reference, value_model = reference_and_value_model(
            policy, inputs, every_prompt, length, config.gradient_checkpointing, config.has_critic
        )
        sources = [
            load_source(model, policy, config.dtype, f"{REWARD_ADAPTER}_{number}", chat_template=config.chat_template)
            for number, model in enumerate(inputs.reward_models, 1)
        ]
        for extension in extensions:
            extension.load(context)
        adapters = [source.adapter_on_policy for source in sources if source.adapter_on_policy]
        adapters += [adapter for extension in extensions for adapter in extension.adapters]
        critic_init = (sources[0].adapter_on_policy or sources[0].loaded) if sources else None
        how = (config.ent_coef > 0, follows, value_model, config.value_fit)
        module = build_actor_critic(policy, critic, critic_init, adapters, *how)
    steps = config.epochs * config.num_mini_batches
    value_rate = config.value_learning_rate or config.learning_rate
    groups = param_groups(module, config.learning_rate, value_rate, frozen_steps=config.critic_warmup * steps)
    engine, roles = build_engine_and_roles(
        run, policy, module, sources, extensions, updates * steps, groups, config.ema_decay, reference
    )
    scorers = [make_scorer(source, run, policy, roles, every_prompt, length) for source in sources]
    weight = config.uncertainty_weight
    rewards = Rewards(scorers, inputs.functions, config.reward_ensemble, weight, run.accelerator, extensions.score)
    for extension in extensions:
        extension.start(engine, roles)
    if inputs.callbacks:
        attach_callbacks(inputs.callbacks, run, policy, engine, updates, config.rollout_batch_size / samples / len(encoded))
    selects = bool(held_out) and config.save_best_policy
    report(run, policy, (len(encoded), len(held_out)), (updates, config.rollout_batch_size, samples), selects, extensions)
    wanted = SamplingParams(length, config.temperature, stop_ids=config.stop_ids)
    sampler, sampling = build_sampler(wanted, config, run, policy, engine, every_prompt)
    profiles = flops_profiles(policy, module, scorers, follows, reference)
    card = model_card(config.prompts, config.reward_model, config.reward_functions, selects, extensions)
    regression = value_regression(roles, run.accelerator) if config.has_critic and config.value_fit != "none" else None
    data = (encoded, held_out, profiles, extensions, card, regression)
    return PPOSetup(run, policy, engine, roles, sampler, sampling, rewards, *data)


def value_regression(roles: Roles, accelerator: Accelerator) -> ValueRegression | None:
    """Return the regression of the value head; None for a value model that the caller gave, which keeps its head."""
    head = roles.value_head
    return ValueRegression(head, accelerator) if isinstance(head, ValueHead) else None


def attach_callbacks(
    callbacks: "TrainerCallbacks", run: Run, policy: LoadedModel, engine: TrainEngine, updates: int, epochs_per_update: float
) -> None:
    """Let transformers' callbacks follow a run."""
    objects: dict[str, Any] = {"model": policy.backbone.peft or policy.backbone.model, "optimizer": engine.optimizer}
    objects["processing_class"] = policy.tokenization.tokenizer
    callbacks.attach(run.config, run.optimization, run.accelerator, objects, updates, epochs_per_update)
    run.callbacks = callbacks


def require_rewards(inputs: PPOInputs) -> None:
    """Raise a UserError for a run without a reward, or with a folder that is not a reward model."""
    if not (inputs.reward_models or inputs.functions or any(each.gives_scores for each in inputs.extensions)):
        kinds = "reward_model, reward_functions, rules, rubrics, attributes, or several of them"
        raise UserError(f"PPO needs a reward: set {kinds}; {PPOConfig.first_run} is an example that runs as it is")
    for model in inputs.reward_models:
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
        average_decay: of an exponential mean of the weights that evaluations and the result use; 0: none.
        reference: a model that takes the place of the copy.
    """
    accelerator = run.accelerator
    reference_is_updated = any(each.updates_reference for each in extensions)
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
    run.print(run.memory.check(module, [*references, *scoring], {"mean of the weights": mean}))
    frozen, initial, *_ = [*(place_frozen_model(model, accelerator) for model in references), None, None]
    engine = build_engine(run, module, total_steps, groups, average_decay)
    return engine, Roles(engine.module, frozen, initial, reference_is_updated)


def report(
    run: Run,
    policy: LoadedModel,
    prompts: tuple[int, int],
    sizes: tuple[int, int, int],
    selects: bool,
    extensions: Extensions,
) -> None:
    """Print the data that the run trains on.

    Args:
        prompts: how many are for training, and for evaluations.
        sizes: updates, responses of each, and responses to a prompt.
    """
    updates, responses, samples = sizes
    run.print(f"ppo: {counted(prompts[0], 'prompt')}, {prompts[1]} held out; model {run.model_config.model}")
    episodes = counted(updates * responses, "episode")
    run.print(f"{counted(updates, 'update')} of {counted(responses, 'response')} ({episodes})")
    warn_if_prompts_are_reread(run, policy.backbone, [samples])
    if selects and not any(each.selects_by for each in extensions):
        run.print(
            "the best policy is chosen by the reward that it is trained on; selection.reward_model lets another one choose"
        )


def model_card(
    prompts: str, reward_models: Sequence[str], functions: Sequence[str], selects: bool, extensions: Extensions
) -> dict[str, str]:
    """Return the lines of the model card that do not change during training; arguments are names, and as for `report`."""
    card = {"data": prompts, "reward model": ", ".join(reward_models) or "none"}
    if functions:
        card["reward functions"] = ", ".join(functions)
    card["chosen by"] = "the reward that it was trained on"
    for extension in extensions:
        card |= extension.card
    return card if selects else card | {"chosen by": "none: the last policy"}


def build_sampler(
    wanted: SamplingParams,
    kind: EngineConfig,
    run: Run,
    policy: LoadedModel,
    engine: TrainEngine,
    prompts: Sequence[EncodedPrompt],
) -> tuple[SamplingEngine, SamplingParams]:
    """Return the sampling engine and its parameters: as many responses at once as the smallest process's memory holds.

    Args:
        wanted: the parameters, whose `batch_tokens` is not read.
        prompts: all that will be sampled for.

    Raises:
        UserError: if the model has no token with one of `stop_token_ids`.
    """
    highest, rows = max(wanted.stop_ids or [0]), vocabulary_rows(policy.backbone.model)
    if highest >= rows:
        raise UserError(f"stop_token_ids: there is no token {highest}; the model has tokens 0 to {rows - 1}")
    longest = max(len(prompt.ids) for prompt in prompts) + wanted.max_new_tokens
    sampler = make_engine(kind, engine, policy, longest)
    at_once = -max_across_processes(-sampling_tokens(run.memory, policy.backbone, longest), run.accelerator)
    return sampler, replace(wanted, batch_tokens=at_once)


def largest_micro_batch(
    setup: PPOSetup, updates: int, responses: int, samples: int, minibatches: int, has_critic: bool
) -> tuple[Experience, list[int], float, int]:
    """Return the micro-batch of this process with the most padded tokens, if all responses have the largest length.

    Args:
        responses: of one update, `samples` to each prompt.
        minibatches: of one epoch.

    Returns:
        An experience of zeros, rows of it, the response tokens of their minibatch, and the padded tokens of the rows.
    """
    accelerator, length = setup.run.accelerator, setup.sampling.max_new_tokens
    seed, budget = setup.run.config.seed, setup.run.optimization.micro_batch_tokens
    found: list[tuple[int, Rollout, list[int], list[int]]] = []
    for update in range(1, min(updates, PLANNED_UPDATES) + 1):
        prompts = prompts_of_update(setup.prompts, update, responses // samples, samples, seed)
        rollout = Rollout(prompts, [[0] * length] * responses, [], [])
        for minibatch in shuffled_minibatches(responses, samples, minibatches, update, 0, seed):
            for batch in plan_minibatch(rollout, minibatch, setup.policy.backbone, budget, accelerator):
                longest = max(len(prompts[row].ids) for row in batch.rows)
                found.append((batch.group_count * longest + len(batch.rows) * length, rollout, minibatch, batch.rows))
    padded_tokens, rollout, minibatch, rows = max(found, key=lambda batch: batch[0])
    zeros = torch.zeros(responses, length)
    old, returns = RoleOutputs(zeros, zeros, zeros, zeros), zeros if has_critic else None
    experience = Experience(rollout, zeros[:, 0], old, zeros, returns, 0.0, zeros[:, 0], {})
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
