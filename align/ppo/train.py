"""PPO with a KL penalty. This file is the loop, and the program that a launcher starts:

    accelerate launch align/ppo/train.py --config configs/ppo/smollm2-135m.yaml

An update samples responses and scores them. It computes log-probs of policy and reference and the critic's values,
then advantages from scores and KL penalty. It trains policy and critic for several epochs. docs/architecture.md lists
the files on the way from a prompt to a weight update.

The names of this file, in the order of an update:

    run          the run folder, its log, devices and processes (`Run`)
    setup        models, engine, sampler, prompts and extensions, made by `prepare` (`PPOSetup`)
    extensions   optional features; the loop calls their hooks at the lines marked "# extensions" (`Extension`)
    state        the KL coefficient and the other values that change from update to update (`PPOState`)
    rollout      B prompts, each with a sampled response (`Rollout`)
    scores       [B] rewards of whole responses; `training_scores` are those after the changes of extensions
    old          log-probs of policy and reference, values and entropy before the update, [B, T] each (`RoleOutputs`)
    experience   the rollout with scores, `old`, advantages and returns (`Experience`)
    minibatch    rows of the rollout, for one optimizer step
    rows         of a minibatch, for one forward and backward pass on this process (a micro-batch)
    sums         metrics of a micro-batch that add up over micro-batches and processes
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from align.batches.encoding import Data, Limits, encode_prompts
from align.batches.mixtures import is_given, split_by_opening
from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.seeds import RngStream
from align.core.tensor_ops import length_mask, whiten
from align.models.checkpoint import WriteModel, save_model, weights_of
from align.models.loading import LoadedModel
from align.ppo.advantages import add_kl_penalty, estimate_advantages
from align.ppo.config import PPOConfig
from align.ppo.evaluation import (
    Candidate,
    PolicyEvaluation,
    PolicySelection,
    evaluation_metrics,
    sample_rows,
    take_over_best_policy,
)
from align.ppo.extensions import (
    Extension,
    TrainingContext,
    configured_extensions,
    product_of_token_weights,
    sum_of_token_rewards,
)
from align.ppo.given_objects import GivenObjects, attach_callbacks, open_policy, reference_and_value_model
from align.ppo.losses import KLController, LossCoefficients, kl_estimate, ppo_loss
from align.ppo.metrics import (
    DriftWatch,
    MissingEosWatch,
    NegativeKLWatch,
    check_ratio,
    phase_flops,
    response_kl,
    rollout_lengths,
    rollout_metrics,
)
from align.ppo.records import Experience, RoleOutputs, Rollout
from align.ppo.reward_functions import WeightedFunction, load_functions
from align.ppo.rewards import Rewards, add_rewards, apply_missing_eos, sum_of_rewards
from align.ppo.rollout import (
    PromptIdentity,
    forward_all_roles,
    pack_rollout,
    plan_minibatch,
    prompts_of_update,
    sample_rollout,
    save_if_scoring_fails,
    shuffled_minibatches,
)
from align.ppo.scoring_models import RewardModelLike, load_rewards, make_scorer, require_longer_collective_timeout
from align.ppo.setup import (
    PPOSetup,
    build_actor_critic,
    build_engine_and_roles,
    flops_profiles,
    largest_micro_batch,
    param_groups,
    report,
    require_reward,
    sampling_of,
)
from align.runtime.distributed import run_on_main
from align.runtime.flops import Clock
from align.runtime.sharding import sharded_loading
from align.sampling.engines import make_engine
from align.tokenization.encoded import EncodedPrompt
from align.training.broken_batch import stop_on_nan
from align.training.checkpoint import Checkpoint, Stateful
from align.training.data_order import PLANNED_UPDATES
from align.training.engine import NotFiniteError
from align.training.start import Model
from align.training.trial import can_try, memory_trial


class PPOState:
    """The values that change from update to update besides the weights; checkpoints keep its stateful objects."""

    def __init__(self, config: PPOConfig, selects_by: str) -> None:
        self.kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.negative_kl = NegativeKLWatch()
        self.drift = DriftWatch()
        self.missing_eos = MissingEosWatch(config.missing_eos_score)
        evaluations = len(range(0, config.total_updates, config.eval_steps)) + 1
        limits = (config.best_policy_confidence, evaluations, config.max_kl, config.critic_warmup)
        self.selection = PolicySelection(*limits, selects_by or "reward")

    def stateful(self) -> dict[str, Stateful]:
        """Return the stateful objects by their names in a checkpoint; none has the name of an extension.

        `missing_eos` has none: after a resume its warning may be printed a second time.
        """
        return {"kl": self.kl, "negative_kl": self.negative_kl, "drift": self.drift, "best_policy": self.selection}


def train(config: PPOConfig, setup: PPOSetup) -> Path:
    """Run all updates from the last checkpoint on; return the folder of the best policy, or of the last."""
    run, extensions, folder = setup.run, setup.extensions, setup.run.folder / "model"
    state = PPOState(config, "".join(extension.selects_by for extension in extensions))
    stateful = state.stateful() | {extension.name: extension for extension in extensions if extension.has_state}
    if run.callbacks:
        stateful["callbacks"] = run.callbacks
    checkpoint = Checkpoint(run, setup.engine, {"prompts": PromptIdentity(setup.prompts), **stateful})
    done = checkpoint.load()
    if config.dry_run:
        return run.end_dry_run(config.total_updates, done)
    if run.callbacks:
        run.callbacks.begin(done)
    if done < config.total_updates and can_try(setup.engine):
        try_largest_micro_batch(config, setup)
    if config.save_best_policy:
        take_over_best_policy(run, state.selection)
    if not done and setup.validation:
        run.log(0, evaluate(config, setup, state, 0))
    run.open()  # locks the folder
    for extension in extensions:
        extension.resume(done)
    for update in run.updates(done + 1, config.total_updates, checkpoint):
        if any(extension.should_stop for extension in extensions):
            break
        clock = Clock()
        experience = collect_experience(config, setup, state, update, clock)  # steps 1 to 4
        corrected = any(extension.corrects_sampling for extension in extensions)
        metrics = rollout_metrics(experience, config.kl_estimator if config.kl_in == "reward" else None, corrected)
        metrics |= update_policy(config, setup, experience, update)  # step 5
        setup.sampler.weights_changed()
        clock.lap("learn")
        # 6. Adapt the KL coefficient. While the policy is frozen, its KL must not change it.
        state.negative_kl.check(response_kl(experience))
        if update > config.critic_warmup:
            state.kl.update(metrics["kl/k1"], len(experience.rollout))
        lengths = rollout_lengths(experience.rollout, setup.policy.backbone, config.micro_batch_tokens)
        flops = sum(phase_flops(setup.flops_profiles, lengths, config.num_ppo_epochs).values())
        for extension in extensions:  # extensions: after the update
            flops += extension.flops(lengths)
            metrics |= extension.metrics()
            extension.after_update(update, experience)
        metrics |= {"flops": flops} | clock.shares()
        metrics |= run.speed(float(experience.lengths.sum()), flops, metrics["time/update"])
        if setup.validation and (update % config.eval_steps == 0 or update == config.total_updates):
            metrics |= evaluate(config, setup, state, update)
        run.log(update, metrics)
        run.set_progress(f"reward {metrics['reward/mean']:.3f}, KL {metrics['kl/k1']:.2f}")
    # A folder of an earlier run may be there. A shared disk may show it to some processes only.
    has_best = state.selection.best is not None and run_on_main(folder.exists, run.accelerator)
    if config.save_best_policy:
        run.print(state.selection.warning() if has_best else "no evaluation chose a best policy; the last one is kept")
    if not (config.save_best_policy and has_best):
        with averaged_weights(setup):
            save_policy(config, setup, folder, {})
    return folder


def collect_experience(config: PPOConfig, setup: PPOSetup, state: PPOState, update: int, clock: Clock) -> Experience:
    """Sample and score the responses of an update, and make the experience that the policy is trained on."""
    run, extensions, backbone = setup.run, setup.extensions, setup.policy.backbone
    # 1. Sample responses from the policy.
    samples = config.samples_per_prompt
    prompts = prompts_of_update(setup.prompts, update, config.rollout_batch_size // samples, samples, config.seed)
    key = (config.seed, RngStream.ROLLOUT, update)
    rollout = sample_rollout(setup.sampler, setup.policy.tokenization, prompts, setup.sampling, key)
    clock.lap("sample")
    run.raise_if_stop_requested()
    # 2. Score them. The roles come later: a reward reads texts and ids. What reads log-probs is a `token_rewards` of step 4.
    with save_if_scoring_fails(run, rollout, update):
        rewards, others = setup.rewards.components(rollout)
        for extension in extensions:  # extensions: rewards
            add_rewards(rewards, extension.score(rollout), extension.name)
        scores, components = sum_of_rewards(rewards, len(rollout)), rewards | others
        training_scores = scores
        for extension in extensions:
            training_scores = extension.transform_scores(training_scores, rollout, components)
    scores = apply_missing_eos(scores, rollout.ended_mask, config.missing_eos_penalty, config.missing_eos_score)
    training_scores = apply_missing_eos(
        training_scores, rollout.ended_mask, config.missing_eos_penalty, config.missing_eos_score
    )
    run.print(state.missing_eos.check(training_scores, rollout.ended_mask))
    # 3. Compute log-probs of policy and reference, and values, in the batches of the first epoch.
    minibatches = shuffled_minibatches(len(rollout), samples, config.num_mini_batches, update, 0, config.seed)
    budget = config.micro_batch_tokens
    old = forward_all_roles(setup.roles, rollout, minibatches, backbone, config.temperature, budget, run.accelerator)
    # 4. Compute advantages.
    extra_token_rewards = sum_of_token_rewards(extensions, rollout, old)  # extensions: token rewards, token weights, records
    weights = product_of_token_weights(extensions, rollout, old)
    kl_coef = state.kl.coef
    advantages, returns = compute_advantages(config, training_scores, old, rollout.lengths, kl_coef, extra_token_rewards)
    clock.lap("score")
    experience = Experience(rollout, training_scores, old, advantages, returns, kl_coef, scores, components, weights)
    for extension in extensions:
        extension.on_experience(update, experience)
    clock.lap("record")
    return experience


def compute_advantages(
    config: PPOConfig,
    scores: Tensor,
    old: RoleOutputs,
    lengths: Tensor,
    kl_coef: float,
    extra_token_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [B, T] from training scores [B] and the KL penalty, and returns [B, T] if there is a critic.

    Args:
        extra_token_rewards: [B, T] further rewards of tokens, of extensions; None: none.
    """
    coef = kl_coef if config.kl_in == "reward" else 0.0
    kl = kl_estimate(old.log_probs, old.ref_log_probs, config.kl_estimator)
    token_rewards = add_kl_penalty(scores, kl, lengths, coef)
    mask = length_mask(lengths, token_rewards.shape[1])
    if extra_token_rewards is not None:
        token_rewards = token_rewards + extra_token_rewards.masked_fill(~mask, 0.0)
    if config.whiten_rewards:
        token_rewards = whiten(token_rewards, mask, shift_mean=False)
    estimator, samples = config.advantage_estimator, config.samples_per_prompt
    return estimate_advantages(estimator, token_rewards, old.values, lengths, config.gamma, config.lam, samples)


def update_policy(config: PPOConfig, setup: PPOSetup, experience: Experience, update: int) -> dict[str, float]:
    """Train policy and critic on an experience for several epochs; metrics are means over all optimizer steps."""
    # 5. Train for several epochs over the rollout in minibatches, one optimizer step each.
    run, engine, rollout = setup.run, setup.engine, experience.rollout
    found: dict[str, list[float]] = {}
    step = (update - 1) * config.num_ppo_epochs * config.num_mini_batches
    counts = (len(rollout), config.samples_per_prompt, config.num_mini_batches)
    for epoch in range(config.num_ppo_epochs):
        for number, minibatch in enumerate(shuffled_minibatches(*counts, update, epoch, config.seed)):
            step += 1
            tokens = float(experience.lengths[minibatch].sum())
            plan = plan_minibatch(rollout, minibatch, setup.policy.backbone, config.micro_batch_tokens, run.accelerator)
            try:
                for rows in engine.micro_batches(plan):
                    loss, sums = micro_batch_loss(config, setup, experience, rows, tokens)
                    engine.backward(loss, sums)
                metrics = dict(engine.sums)
                if epoch == number == 0:
                    run.print(check_ratio(metrics["ratio/abs_error"], run.accelerator.device))
                for extension in setup.extensions:  # extensions: losses
                    metrics |= extension.extra_loss((update, epoch, number), len(minibatch))
                metrics |= engine.step(step)
            except NotFiniteError as error:
                stop_on_nan(run, update, error, [{"row": row, "response": rollout.texts[row]} for row in minibatch])
            for name, value in metrics.items():
                found.setdefault(name, []).append(value)
    found["loss/total"] = found.pop("loss")
    return {name: sum(values) / len(values) for name, values in found.items()}


def micro_batch_loss(
    config: PPOConfig, setup: PPOSetup, experience: Experience, rows: list[int], tokens: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of some rows of a minibatch with `tokens` response tokens, and metrics that add up."""
    device = setup.run.accelerator.device
    prompt, response, prompt_of_response = pack_rollout(experience.rollout, rows, device)
    new = setup.roles.policy(prompt, response, config.temperature, prompt_of_response)
    batch = experience.loss_inputs(rows, response.ids.shape[1], device)
    coefficients = LossCoefficients(
        cliprange=config.cliprange,
        cliprange_high=config.cliprange_high or config.cliprange,
        cliprange_value=config.cliprange_value or math.inf,
        vf_coef=config.vf_coef,
        ent_coef=config.ent_coef,
        kl_coef=experience.kl_coef,
        kl_estimator=config.kl_estimator if config.kl_in == "loss" else None,
    )
    return ppo_loss(new, batch, response.mask(), tokens, coefficients)


@torch.no_grad()
def evaluate(config: PPOConfig, setup: PPOSetup, state: PPOState, update: int) -> dict[str, float]:
    """Evaluate the policy on the fixed prompts, with the same noise each time, and keep it if it is the best."""
    run, extensions, backbone = setup.run, setup.extensions, setup.policy.backbone
    with averaged_weights(setup):
        key = (config.seed, RngStream.VALIDATION_SAMPLES)
        rollout = sample_rollout(setup.sampler, setup.policy.tokenization, setup.validation, setup.sampling, key)
        with save_if_scoring_fails(run, rollout, update):
            rewards, _ = setup.rewards.components(rollout)
            for extension in extensions:
                add_rewards(rewards, extension.score(rollout), extension.name)
            evaluation = PolicyEvaluation(update, rollout, sum_of_rewards(rewards, len(rollout)))
            for extension in extensions:
                extension.evaluate(evaluation)
        scores = evaluation.final_scores(config.missing_eos_penalty, config.missing_eos_score)
        rows, budget = [list(range(len(rollout)))], config.micro_batch_tokens
        outputs = forward_all_roles(setup.roles, rollout, rows, backbone, config.temperature, budget, run.accelerator)
        metrics = evaluation_metrics(evaluation, scores, outputs)
        for warning in state.drift.check(metrics):
            run.print(f"warning: reward rose, but {warning}: read the samples before trusting it")
        for extension in extensions:
            run.print(extension.after_evaluation(update, metrics))
        run.record("samples", sample_rows(evaluation, scores), update)
        chosen = scores if evaluation.selection_scores is None else evaluation.selection_scores
        if state.selection.update(Candidate(update, chosen.tolist(), evaluation.violated_constraint), metrics["kl"]):
            if config.save_best_policy:
                save_policy(config, setup, run.folder / "model", metrics | {"update": update})
            metrics["is_best"] = 1.0
        if update and config.keep_policies:
            save_policy(config, setup, run.folder / "policies" / f"update-{update:06d}", metrics | {"update": update})
    return {f"validation/{name}": value for name, value in metrics.items()}


@contextmanager
def averaged_weights(setup: PPOSetup) -> Iterator[None]:
    """Use the averaged weights for evaluation and saving, if the run averages them."""
    if setup.engine.average is None:
        yield
        return
    with setup.engine.averaged_weights():
        setup.sampler.weights_changed()
        yield
    setup.sampler.weights_changed()


def save_policy(
    config: PPOConfig, setup: PPOSetup, folder: Path, metrics: dict[str, float], write: WriteModel = save_model
) -> None:
    """Save the current policy as a folder that other programs load."""
    state = setup.engine.model_state()
    card = {"title": "Policy trained by PPO", "stage": "ppo", "reward model": ", ".join(config.reward_model) or "none"}
    card["chosen by"] = "the reward that it was trained on"
    for extension in setup.extensions:
        card |= extension.card
    if not (config.save_best_policy and setup.validation):
        card["chosen by"] = "none: the last policy"
    card |= {name: f"{value:.4g}" for name, value in metrics.items()}
    weights = weights_of(setup.policy.backbone, state, "backbone.model.")
    run_on_main(lambda: write(folder, setup.policy, weights, card), setup.run.accelerator)


def try_largest_micro_batch(config: PPOConfig, setup: PPOSetup) -> None:
    """Run the largest micro-batch of this process, with responses of the largest length, and report its peak of memory."""
    plans, samples, length = [], config.samples_per_prompt, config.max_new_tokens
    for update in range(1, min(config.total_updates, PLANNED_UPDATES) + 1):
        prompts = prompts_of_update(setup.prompts, update, config.rollout_batch_size // samples, samples, config.seed)
        rollout = Rollout(prompts, [[0] * length] * len(prompts), [], [])
        plans.append((rollout, shuffled_minibatches(len(rollout), samples, config.num_mini_batches, update, 0, config.seed)))
    backbone, budget, accelerator = setup.policy.backbone, config.micro_batch_tokens, setup.run.accelerator
    tokens, rollout, minibatch, rows = largest_micro_batch(plans, backbone, budget, accelerator)
    zeros = torch.zeros(len(rollout), length)
    old, returns = RoleOutputs(zeros, zeros, zeros, zeros), zeros if config.has_critic else None
    experience = Experience(rollout, zeros[:, 0], old, zeros, returns, config.kl_coef, zeros[:, 0], {})
    with memory_trial(setup.engine, rows, tokens):
        setup.engine.backward(*micro_batch_loss(config, setup, experience, rows, float(length * len(minibatch))))


def encode_all_prompts(
    config: PPOConfig, prompts: Data, validation: Data, policy: LoadedModel
) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Return the prompts of training and those of evaluations, which may be a part of the given ones."""
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    encoded = encode_prompts(prompts, policy, limits, config.skip_bad_rows)
    encoded, split = split_by_opening(encoded, config.validation_split)
    return encoded, encode_prompts(validation, policy, limits, config.skip_bad_rows) if is_given(validation) else split


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
    require_reward(reward_models, functions, extensions)
    moves = any(extension.updates_reference for extension in extensions)
    if moves and given.reference is not None:
        raise UserError("reference_refresh copies the policy into the reference; leave out reference, or set it to 0")
    run, policy = open_policy(config, model, given, copies=2 if moves else 1)
    if functions and run.accelerator.num_processes > 1:
        require_longer_collective_timeout(config.reward_timeout, config.collective_timeout)
    encoded, held_out = encode_all_prompts(config, prompts, validation, policy)
    every_prompt = [*encoded, *held_out]
    sizes = (config.samples_per_prompt, config.max_prompt_tokens, config.max_new_tokens)
    scoring = (config.missing_eos_penalty, config.missing_eos_score, config.reward_timeout)
    reference, value_model = reference_and_value_model(
        policy, given, every_prompt, config.max_new_tokens, config.gradient_checkpointing, config.has_critic
    )
    context = TrainingContext(
        run, policy, encoded, every_prompt, config.total_updates, config.critic_warmup, *sizes, *scoring
    )
    with sharded_loading(run.accelerator):
        sources = load_rewards(reward_models, policy, config.dtype, config.chat_template)
        for extension in extensions:
            extension.load(context)
        adapters = [source.adapter_on_policy for source in sources if source.adapter_on_policy]
        adapters += [adapter for extension in extensions for adapter in extension.adapters]
        critic = config.critic if config.has_critic else "none"
        critic_init = (sources[0].adapter_on_policy or sources[0].loaded) if sources else None
        with_entropy = config.ent_coef > 0
        module = build_actor_critic(policy, critic, critic_init, adapters, with_entropy, moves, value_model)
    steps = config.num_ppo_epochs * config.num_mini_batches
    rates = (config.learning_rate, config.value_learning_rate or config.learning_rate)
    groups = param_groups(module, *rates, frozen_steps=config.critic_warmup * steps)
    total, decay = config.total_updates * steps, config.ema_decay
    engine, roles = build_engine_and_roles(run, policy, module, sources, extensions, total, groups, decay, reference)
    scorers = [make_scorer(source, run, policy, roles, every_prompt, config.max_new_tokens) for source in sources]
    ensemble, timeout = (config.reward_ensemble, config.uncertainty_weight), config.reward_timeout
    rewards = Rewards(scorers, functions, *ensemble, timeout, run.accelerator)
    for extension in extensions:
        extension.start(engine, roles)
    selected_by_reward = config.save_best_policy and not any(extension.selects_by for extension in extensions)
    rollouts = (config.total_updates, config.rollout_batch_size, config.samples_per_prompt)
    report(run, policy, len(encoded), len(held_out), rollouts, selected_by_reward)
    longest = max(len(prompt.ids) for prompt in every_prompt) + config.max_new_tokens
    sampler = make_engine(config, engine, policy, longest)
    sampling = sampling_of(run, policy, longest, config.max_new_tokens, config.temperature, config.stop_ids)
    if given.callbacks:
        per_update = config.rollout_batch_size / config.samples_per_prompt / len(encoded)
        attach_callbacks(given.callbacks, run, policy, engine, config.total_updates, per_update)
    profiles = flops_profiles(policy, module, rewards, moves, reference)
    return PPOSetup(run, policy, engine, roles, sampler, sampling, rewards, encoded, held_out, profiles, extensions)


def run_ppo(config: PPOConfig) -> Path:
    """Train a policy by PPO; return the best policy's folder. Raise a UserError for a mistake in settings or data."""
    functions, extensions = load_functions(config.reward_functions), configured_extensions(vars(config))
    prompts, validation = config.prompts, config.validation_prompts
    setup = prepare(config, config.model, config.reward_model, functions, prompts, validation, extensions)
    folder = train(config, setup)
    setup.close()
    return folder


def main() -> None:
    """Run PPO with the settings of the command line."""
    run_stage(PPOConfig, run_ppo)


if __name__ == "__main__":
    main()
