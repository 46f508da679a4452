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
from align.batches.micro_batches import MicroBatch
from align.batches.mixtures import is_given, split_by_opening
from align.core.errors import UserError, counted
from align.models.backbone import Backbone
from align.models.heads import LanguageModel, ScalarHead, ValueHead
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER, ActorCritic, Roles
from align.models.vocabulary import vocabulary_rows
from align.ppo.actor_critic import Critic, build_actor_critic, copy_backbone, param_groups
from align.ppo.config import PPOConfig
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.extensions.active import Extensions
from align.ppo.flops import RoleFlopsProfiles, flops_profiles
from align.ppo.inputs import PPOInputs, reference_and_value_model, with_reference_adapter
from align.ppo.records import Experience, ExperienceBatch, RoleOutputs, Rollout, TrainingSignal
from align.ppo.reward_functions import WeightedFunction
from align.ppo.rewards import MissingEos, Rewards
from align.ppo.rollout import plan_minibatch, prompts_of_update, shuffled_minibatches
from align.ppo.scoring_models import RewardSource, load_source, make_scorer, split_remote
from align.ppo.value_regression import ValueRegression
from align.reward.checkpoint import require_reward_model
from align.reward.remote import RemoteRewardModel, is_url
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import max_across_processes
from align.runtime.sharding import full_numel, place_frozen_model, sharded_loading
from align.sampling.engines import SamplingEngine, make_engine, sampling_tokens
from align.sampling.generation import SamplingParams
from align.sampling.settings import EngineConfig
from align.tokenization.encoded import EncodedPrompt
from align.training.checkpoint.checkpoint import Stateful
from align.training.data_order import PLANNED_UPDATES, examples_digest, require_same_examples
from align.training.engine import TrainEngine
from align.training.memory import FLOAT32_BYTES
from align.training.optimizer import ParamGroup
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, warn_if_prompts_are_reread

if TYPE_CHECKING:
    from align.training.callbacks import TrainerCallbacks


@dataclass(frozen=True, kw_only=True)
class PPOSetup:
    """Everything that the loop needs in addition to its settings."""

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
    missing_eos: MissingEos
    prompts: list[EncodedPrompt]
    validation: list[EncodedPrompt]
    """Fixed prompts for evaluation; may be empty."""
    flops_profiles: RoleFlopsProfiles
    extensions: Extensions
    card: dict[str, str]
    """The lines of the model card that do not change during training."""
    value_regression: ValueRegression | None = None
    """Fits the value head. If None, it is trained only by gradients."""

    def stateful(self) -> dict[str, Stateful]:
        """Return the stateful objects of the setup by name in a checkpoint."""
        extensions = {extension.name: extension for extension in self.extensions if extension.has_state}
        critic = {"value_regression": self.value_regression} if self.value_regression else {}
        return {"prompts": PromptIdentity(self.prompts), **critic, **extensions}

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
    """Open the run's folder, load all models and data, and build the engines. Raise a UserError if they are invalid."""
    extensions = inputs.extensions
    require_rewards(inputs)
    run = Run(inputs.policy.settings(config), "ppo", inputs.callbacks)
    loaded = inputs.policy.load(run, frozen_copies=0 if inputs.reference else 1)
    policy = with_reference_adapter(loaded, inputs.reference)
    samples, length, updates = config.samples_per_prompt, config.max_new_tokens, config.total_updates
    prompts, held_out = encode_all_prompts(config, inputs, policy)
    all_prompts, missing_eos = [*prompts, *held_out], MissingEos(config.missing_eos_penalty, config.missing_eos_score)
    # Models: the policy with its critic and all adapters in one module, a reference, and separate reward models.
    context = training_context(config, run, policy, prompts, all_prompts, missing_eos)
    models, remote = split_remote(inputs.reward_models, policy)
    with sharded_loading(run.accelerator):
        reference, value_model = reference_and_value_model(
            policy, inputs, all_prompts, length, config.gradient_checkpointing, config.has_critic
        )
        sources = [
            load_source(
                model,
                policy,
                config.dtype,
                f"{REWARD_ADAPTER}_{number}",
                chat_template=config.chat_template,
                quantization=config.quantization,
            )
            for number, model in enumerate(models, 1)
        ]
        for extension in extensions:
            extension.load(context)
        module = build_module(config, policy, sources, extensions, value_model)
    steps = config.epochs * config.num_mini_batches
    value_rate = config.value_learning_rate or config.learning_rate
    groups = param_groups(module, config.learning_rate, value_rate, frozen_steps=config.critic_warmup * steps)
    engine, roles = build_engine_and_roles(
        run, policy, module, sources, extensions, updates * steps, groups, config.ema_decay, reference
    )
    scorers = [make_scorer(source, run, policy, roles, all_prompts, length) for source in sources]
    for extension in extensions:
        extension.start(engine, roles)
    if inputs.callbacks:
        epochs_per_update = config.rollout_batch_size / samples / len(prompts)
        attach_callbacks(inputs.callbacks, run, policy, engine, updates, epochs_per_update)
    selects = bool(held_out) and config.save_best_policy
    print_plan(config, run, policy, len(prompts), len(held_out), selects, extensions)
    wanted = SamplingParams(length, config.temperature, stop_ids=config.stop_ids)
    sampler, sampling = build_sampler(wanted, config, run, policy, engine, all_prompts)
    return PPOSetup(
        run=run,
        policy=policy,
        engine=engine,
        roles=roles,
        sampler=sampler,
        sampling=sampling,
        rewards=combined_rewards(config, scorers, [*inputs.functions, *remote], run.accelerator, extensions),
        missing_eos=missing_eos,
        prompts=prompts,
        validation=held_out,
        flops_profiles=flops_profiles(policy, module, scorers, reference),
        extensions=extensions,
        card=model_card(config.prompts, config.reward_model, config.reward_functions, selects, extensions),
        value_regression=value_regression(roles, run.accelerator)
        if config.has_critic and config.value_fit != "none"
        else None,
    )


def training_context(
    config: PPOConfig,
    run: Run,
    policy: LoadedModel,
    training_prompts: list[EncodedPrompt],
    prompts: list[EncodedPrompt],
    missing_eos: MissingEos,
) -> TrainingContext:
    """Return the training context of extensions."""
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
        missing_eos=missing_eos,
    )


def encode_all_prompts(
    config: PPOConfig, inputs: PPOInputs, policy: LoadedModel
) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Return the training prompts and the evaluation prompts."""
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    encoded = encode_prompts(inputs.prompts, policy, limits, config.skip_bad_rows)
    prompts, held_out = split_by_opening(encoded, config.validation_split)
    if is_given(inputs.validation):
        held_out = encode_prompts(inputs.validation, policy, limits, config.skip_bad_rows)
    return prompts, held_out


def combined_rewards(
    config: PPOConfig,
    scorers: Sequence[RewardModelScorer],
    functions: Sequence[WeightedFunction],
    accelerator: Accelerator,
    extensions: Extensions,
) -> Rewards:
    """Return the rewards of models, functions and extensions."""
    return Rewards(
        scorers,
        functions,
        ensemble=config.reward_ensemble,
        uncertainty_weight=config.uncertainty_weight,
        accelerator=accelerator,
        extra=extensions.score,
    )


def build_module(
    config: PPOConfig,
    policy: LoadedModel,
    sources: Sequence[RewardSource],
    extensions: Extensions,
    value_model: tuple[Backbone, ScalarHead] | None,
) -> ActorCritic:
    """Return the module that PPO trains, with the adapters of all reward models that share the policy's base."""
    critic: Critic = config.critic if config.has_critic else "none"
    adapters = [source.adapter_on_policy for source in sources if source.adapter_on_policy]
    adapters += [adapter for extension in extensions for adapter in extension.adapters]
    return build_actor_critic(
        policy,
        critic,
        critic_init=(sources[0].adapter_on_policy or sources[0].loaded) if sources else None,
        adapters=adapters,
        with_entropy=config.ent_coef > 0,
        value_model=value_model,
        value_fit=config.value_fit,
    )


def value_regression(roles: Roles, accelerator: Accelerator) -> ValueRegression | None:
    """Return the regression of the value head, or None for a caller's `value_model`, which keeps its head."""
    head = roles.value_head
    return ValueRegression(head, accelerator) if isinstance(head, ValueHead) else None


def attach_callbacks(
    callbacks: "TrainerCallbacks", run: Run, policy: LoadedModel, engine: TrainEngine, updates: int, epochs_per_update: float
) -> None:
    """Attach transformers' callbacks to a run."""
    objects: dict[str, Any] = {"model": policy.backbone.peft or policy.backbone.model, "optimizer": engine.optimizer}
    objects["processing_class"] = policy.tokenization.tokenizer
    callbacks.attach(run.config, run.optimization, run.accelerator, objects, updates, epochs_per_update)


def require_rewards(inputs: PPOInputs) -> None:
    """Raise a UserError if a run has no reward, or a folder is not a reward model."""
    if not (inputs.reward_models or inputs.functions or any(extension.gives_scores for extension in inputs.extensions)):
        raise UserError(
            "no reward given: set reward_model or reward_functions (or rules, rubrics or attributes), or start from "
            f"{PPOConfig.first_run}"
        )
    for model in inputs.reward_models:
        if isinstance(model, str) and is_url(model):
            RemoteRewardModel(model).check()
        elif isinstance(model, str):
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
        total_steps: number of optimizer steps in the run.
        average_decay: decay of the exponential moving average of the weights, which is evaluated and saved. 0 disables it.
        reference: separate reference model. Default: a copy of the policy.
    """
    accelerator = run.accelerator
    with sharded_loading(accelerator):
        references = [] if policy.adapter or reference else [LanguageModel(copy_backbone(policy.backbone))]
    references += [LanguageModel(reference)] if reference else []
    scoring: list[nn.Module] = [source.loaded.model for source in sources if source.loaded]
    scoring += [model for extension in extensions for model in extension.modules]
    trained = sum(full_numel(weight) for weight in module.parameters() if weight.requires_grad)
    average = FLOAT32_BYTES * trained if average_decay else 0
    run.print(run.memory.check(module, [*references, *scoring], {"mean of the weights": average}))
    frozen = [place_frozen_model(model, accelerator) for model in references]
    engine = build_engine(run, module, total_steps, groups, average_decay)
    return engine, Roles(engine.module, *frozen)


def print_plan(
    config: PPOConfig,
    run: Run,
    policy: LoadedModel,
    training_prompts: int,
    validation_prompts: int,
    selects: bool,
    extensions: Extensions,
) -> None:
    """Print the numbers of prompts and updates. `selects` is true if evaluations select the policy to keep."""
    prompts = counted(training_prompts, "prompt")
    run.print(f"ppo: {prompts}, {validation_prompts} held out; model {run.model_config.model}")
    updates, responses = config.total_updates, config.rollout_batch_size
    episodes = counted(updates * responses, "episode")
    run.print(f"{counted(updates, 'update')} of {counted(responses, 'response')} ({episodes})")
    warn_if_prompts_are_reread(run, policy.backbone, [config.samples_per_prompt])
    if selects and not any(extension.selects_by for extension in extensions):
        run.print("selecting the best policy by its training reward; set selection.reward_model to use another model")


def model_card(
    prompts: str, reward_models: Sequence[str], functions: Sequence[str], selects: bool, extensions: Extensions
) -> dict[str, str]:
    """Return the lines of the model card that do not change during training; `selects` as for `print_plan`."""
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
    """Return the sampling engine and its parameters. The batch size fits the process with the least memory.

    Args:
        wanted: requested parameters. Their `batch_tokens` is ignored.
        prompts: all prompts for sampling.

    Raises:
        UserError: if one of `stop_token_ids` is not in the model's vocabulary.
    """
    highest, rows = max(wanted.stop_ids or [0]), vocabulary_rows(policy.backbone.model)
    if highest >= rows:
        raise UserError(f"stop_token_ids: there is no token {highest}; the model has tokens 0 to {rows - 1}")
    longest = max(len(prompt.ids) for prompt in prompts) + wanted.max_new_tokens
    sampler = make_engine(kind, engine, policy, longest)
    at_once = -max_across_processes(-sampling_tokens(run.memory, policy.backbone, longest), run.accelerator)
    return sampler, replace(wanted, batch_tokens=at_once)


def largest_micro_batch(config: PPOConfig, setup: PPOSetup) -> tuple[ExperienceBatch, int]:
    """Return the micro-batch of this process with the most padded tokens, and the number of tokens.

    All responses have the largest length. Token ids and tensors are 0.
    """
    run, length, responses = setup.run, setup.sampling.max_new_tokens, config.rollout_batch_size
    samples = config.samples_per_prompt
    candidates: list[tuple[int, Rollout, list[int], MicroBatch]] = []
    for update in range(1, min(config.total_updates, PLANNED_UPDATES) + 1):
        prompts = prompts_of_update(setup.prompts, update, count=responses // samples, samples=samples, seed=config.seed)
        rollout = Rollout(prompts=prompts, responses=[[0] * length] * responses, ended=[], texts=[])
        for minibatch in shuffled_minibatches(
            responses,
            samples=samples,
            num_mini_batches=config.num_mini_batches,
            update=update,
            epoch=0,
            seed=config.seed,
        ):
            for part in plan_minibatch(
                rollout, minibatch, setup.policy.backbone, run.optimization.micro_batch_tokens, run.accelerator
            ):
                longest = max(len(prompts[row].ids) for row in part.rows)
                candidates.append((len(part.groups) * longest + len(part.rows) * length, rollout, minibatch, part))
    padded_tokens, rollout, minibatch, part = max(candidates, key=lambda candidate: candidate[0])
    zeros = torch.zeros(responses, length)
    experience = Experience(
        rollout=rollout,
        scores=zeros[:, 0],
        signal=TrainingSignal(zeros[:, 0], {}),
        old=RoleOutputs(log_probs=zeros, ref_log_probs=zeros, values=zeros, entropy=zeros),
        advantages=zeros,
        returns=zeros,
        kl_coef=0.0,
    )
    return experience.batch(part, minibatch, run.accelerator.device, setup.roles.trains_critic), padded_tokens


class PromptIdentity:
    """Recognizes the prompts of a checkpoint, on whose order `prompts_of_update` depends."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self.values = {"examples": len(prompts), "digest": examples_digest(prompt.ids for prompt in prompts)}

    def state_dict(self) -> dict[str, Any]:
        """Return the number and digest of the prompts."""
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError if a checkpoint has other prompts."""
        require_same_examples("the prompts", state, self.values)


@contextmanager
def save_if_scoring_fails(run: Run, rollout: Rollout, update: int) -> Iterator[None]:
    """Save the rollout if scoring fails, and name the file in the error: sampling may have taken an hour."""
    try:
        yield
    except UserError as error:
        rows = [
            {"prompt": list(prompt.conversation), "response": text, "ended": ended, "category": prompt.category}
            for prompt, text, ended in zip(rollout.prompts, rollout.texts, rollout.ended, strict=True)
        ]
        run.record("unscored", rows, update)
        raise UserError(f"{error}; the rollout of update {update} is in {run.folder / 'unscored.jsonl'}") from error
