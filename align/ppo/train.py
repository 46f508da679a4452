"""PPO with a KL penalty. This file is the loop, and the program that a launcher starts:

    accelerate launch align/ppo/train.py --config configs/ppo/smollm2-135m.yaml

An update samples responses and scores them. It computes log-probs of policy and reference and the critic's values,
then advantages from scores and KL penalty. It trains policy and critic for several epochs. docs/architecture.md lists
the files on the way from a prompt to a weight update.

The names of this file, in the order of an update:

    run          the run folder, its log, devices and processes (`Run`)
    setup        models, engine, sampler, prompts and extensions, made by `prepare` (`PPOSetup`)
    extensions   optional features, called at the lines marked "# extensions" (`Extensions`)
    monitor      time, FLOPs, metrics, watches and the log (`PPOMonitor`)
    evaluator    evaluates the policy on fixed prompts and keeps the best one (`Evaluator`)
    rollout      B prompts, each with a sampled response (`Rollout`)
    scores       the rewards of the responses, [B] (`Scores`)
    old          log-probs of policy and reference, values and entropy before the update, [B, T] each (`RoleOutputs`)
    signal       the scores after the changes of extensions (`TrainingSignal`)
    experience   the rollout with scores, `old`, advantages and returns (`Experience`)
    minibatch    rows of the rollout, for one optimizer step
    batch        the tensors of a micro-batch, for one forward and backward pass on this process (`ExperienceBatch`)
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from align.core.launch import run_stage
from align.core.seeds import RngStream
from align.core.tensor_ops import BatchLoss, length_mask, whiten
from align.models.roles import Roles
from align.ppo.actor_critic import POLICY_GROUP
from align.ppo.advantages import add_kl_penalty, advantages_and_returns, estimate_advantages, min_advantage_std
from align.ppo.config import PPOConfig
from align.ppo.evaluation import Evaluator
from align.ppo.extensions import OptimizerStep
from align.ppo.extensions.discovery import configured_extensions
from align.ppo.inputs import PPOInputs
from align.ppo.losses import KLController, LossCoefficients, critic_loss, kl_estimate, ppo_loss
from align.ppo.monitor import PPOMonitor
from align.ppo.records import Experience, ExperienceBatch, RoleOutputs, Rollout, TrainingSignal
from align.ppo.reward_functions import load_functions
from align.ppo.rollout import forward_all_roles, plan_minibatch, prompts_of_update, sample_rollout, shuffled_minibatches
from align.ppo.setup import PPOSetup, largest_micro_batch, prepare, save_if_scoring_fails
from align.ppo.value_regression import ValueRegression
from align.training.checkpoint.checkpoint import Checkpoint
from align.training.model_source import ModelSource
from align.training.peak_memory import measure_peak_memory, should_measure_memory


def train(config: PPOConfig, setup: PPOSetup) -> Path:
    """Run all updates from the last checkpoint on; return the folder of the best policy, or of the last."""
    run, extensions = setup.run, setup.extensions
    kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
    monitor = PPOMonitor(config, setup)
    evaluator = Evaluator(setup, config, total_updates=config.total_updates, critic_warmup=config.critic_warmup)
    stateful = {"kl": kl, **setup.stateful(), **monitor.stateful(), **evaluator.stateful()}
    checkpoint = Checkpoint(run, setup.engine, stateful)
    done = checkpoint.load()
    if config.dry_run:
        return run.end_dry_run(config.total_updates, done)
    run.begin(done)
    if done < config.total_updates:
        measure_largest_micro_batch(config, setup)
    evaluator.begin(done)
    run.open()  # locks the folder, unless a result above has been written to it already
    monitor.begin(done)

    updates = run.updates(done + 1, config.total_updates, checkpoint)
    for update in extensions.until_stop(updates, run.accelerator):  # extensions: early stop
        with monitor.update_of(update):
            # 1. Sample responses from the policy.
            rollout = sample_responses(config, setup, update)
            monitor.lap("sample")
            run.raise_if_stop_requested()
            # 2. Score them. Rewards see text and ids only; what needs log-probs goes in `Extension.shape`.
            with save_if_scoring_fails(run, rollout, update):
                scores = setup.rewards(rollout)  # extensions: score
            # 3. Compute log-probs of policy and reference, and values.
            old = forward_roles(config, setup, rollout, update)
            # 4. Compute advantages from the score and the KL penalty.
            with save_if_scoring_fails(run, rollout, update):
                signal = TrainingSignal(scores.total, dict(scores.components))
                signal = extensions.shape(signal, rollout, old)  # extensions: shape
            experience = make_experience(
                config, setup, update, rollout, scores=scores.total, signal=signal, old=old, kl_coef=kl.coef
            )
            monitor.lap("score")
            monitor.add_experience(update, experience)
            # 5. Train policy and critic for several epochs of minibatches, one optimizer step each.
            train_on(experience, config, setup, monitor, update)
            setup.sampler.weights_changed()
            monitor.lap("learn")
        extensions.after_update(update, experience)  # extensions: after the update
        # 6. Adapt the KL coefficient. While the policy is frozen, its KL must not change it.
        if update > config.critic_warmup:
            kl.update(monitor.row["kl/k1"], len(rollout))
        if evaluator.is_due(update):
            monitor.add(evaluator.evaluate(update))
        with evaluator.naming_kept_policy():
            monitor.log_update(update)
    return evaluator.finish()


def sample_responses(config: PPOConfig, setup: PPOSetup, update: int) -> Rollout:
    """Sample a response to each prompt of an update."""
    samples = config.samples_per_prompt
    prompts = prompts_of_update(
        setup.prompts, update, count=config.rollout_batch_size // samples, samples=samples, seed=config.seed
    )
    key = (config.seed, RngStream.ROLLOUT, update)
    return sample_rollout(setup.sampler, setup.policy.tokenization, prompts, setup.sampling, key)


def forward_roles(config: PPOConfig, setup: PPOSetup, rollout: Rollout, update: int) -> RoleOutputs:
    """Compute the outputs of all roles for a rollout, in the micro-batches of the first epoch."""
    return forward_all_roles(
        setup.roles,
        rollout,
        minibatches=minibatches_of_epoch(config, len(rollout), update, epoch=0),
        backbone=setup.policy.backbone,
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
        accelerator=setup.run.accelerator,
        with_value_states=setup.value_regression is not None,
    )


def minibatches_of_epoch(config: PPOConfig, rows: int, update: int, epoch: int) -> list[list[int]]:
    """Return the rows of each minibatch of an epoch."""
    return shuffled_minibatches(
        rows,
        samples=config.samples_per_prompt,
        num_mini_batches=config.num_mini_batches,
        update=update,
        epoch=epoch,
        seed=config.seed,
    )


def make_experience(
    config: PPOConfig,
    setup: PPOSetup,
    update: int,
    rollout: Rollout,
    scores: Tensor,
    signal: TrainingSignal,
    old: RoleOutputs,
    kl_coef: float,
) -> Experience:
    """Apply the penalty for a missing EOS, fit the value head, and estimate advantages and returns."""
    ended, lengths = rollout.ended_mask, rollout.lengths
    scores = setup.missing_eos.apply(scores, ended)
    signal = replace(signal, scores=setup.missing_eos.apply(signal.scores, ended))
    if setup.value_regression and (update == 1 or config.value_fit == "every"):
        rewards = shape_rewards(config, signal, old, lengths, kl_coef)
        old = fit_values(setup.value_regression, rollout, old, rewards, config.gamma, config.samples_per_prompt)
    advantages, returns = compute_advantages(config, signal, old, lengths, kl_coef)
    return Experience(
        rollout=rollout,
        scores=scores,
        signal=signal,
        old=old,
        advantages=advantages,
        returns=returns,
        kl_coef=kl_coef,
    )


def shape_rewards(config: PPOConfig, signal: TrainingSignal, old: RoleOutputs, lengths: Tensor, kl_coef: float) -> Tensor:
    """Return the reward [B, T] of each token: the score on the last token, the KL penalty, and `signal`'s token rewards."""
    coef = kl_coef if config.kl_in == "reward" else 0.0
    kl = kl_estimate(old.log_probs, old.ref_log_probs, config.kl_estimator)
    rewards = add_kl_penalty(signal.scores, kl, lengths, coef)
    mask = length_mask(lengths, rewards.shape[1])
    if signal.token_rewards is not None:
        rewards = rewards + signal.token_rewards.masked_fill(~mask, 0.0)
    return whiten(rewards, mask, shift_mean=False) if config.whiten_rewards else rewards


def compute_advantages(
    config: PPOConfig, signal: TrainingSignal, old: RoleOutputs, lengths: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [B, T], and returns [B, T] if there is a critic; arguments as for `shape_rewards`."""
    rewards, extra = shape_rewards(config, signal, old, lengths, kl_coef), signal.token_rewards
    totals = signal.scores
    if extra is not None:
        totals = totals + extra.masked_fill(~length_mask(lengths, extra.shape[1]), 0.0).sum(1)
    return estimate_advantages(
        config.advantage_estimator,
        rewards,
        old.values,
        lengths,
        gamma=config.gamma,
        lam=config.lam,
        samples=config.samples_per_prompt,
        value_lam=config.value_lam,
        min_std=min_advantage_std(totals, config.whitening_floor),
    )


def fit_values(
    regression: ValueRegression, rollout: Rollout, old: RoleOutputs, rewards: Tensor, gamma: float, samples: int
) -> RoleOutputs:
    """Fit the value head to the returns of a rollout; return `old` with cross-fitted values."""
    lengths = rollout.lengths
    _, returns = advantages_and_returns(rewards, torch.zeros_like(rewards), lengths, gamma, lam=1.0)
    fit = regression.fit(old.value_states, returns, lengths, samples)
    cross_fitted, fitted = fit or (old.values, None)
    return replace(old, values=cross_fitted, fitted_values=fitted, value_states={})


def train_on(experience: Experience, config: PPOConfig, setup: PPOSetup, monitor: PPOMonitor, update: int) -> None:
    """Train policy and critic on an experience for several epochs."""
    engine, roles, rollout = setup.engine, setup.roles, experience.rollout
    coefficients = config.loss_coefficients(experience.kl_coef)
    step = (update - 1) * config.epochs * config.num_mini_batches
    trains_policy = True
    for epoch in range(config.epochs):
        for number, minibatch in enumerate(minibatches_of_epoch(config, len(rollout), update, epoch)):
            trains_policy = trains_policy and epoch < config.num_ppo_epochs
            if not (trains_policy or roles.trains_critic):
                return
            step += 1
            loss_of = policy_and_critic_loss if trains_policy else critic_loss_alone
            with monitor.optimizer_step(rollout, minibatch):
                for batch in micro_batches(experience, minibatch, config, setup):
                    engine.backward(loss_of(roles, batch, config.temperature, coefficients), batch.weight)
                metrics = engine.reduce_gradients()
                if epoch == number == 0:
                    monitor.check_first_minibatch(metrics)
                if trains_policy and 0 < config.max_update_kl < metrics["policy/approx_kl"]:
                    trains_policy = False  # the remaining steps train a critic that learns by gradients, if there is one
                if trains_policy:
                    metrics |= setup.extensions.extra_loss(  # extensions: losses
                        OptimizerStep(
                            update=update, epoch=epoch, minibatch=number, responses=len(minibatch), metrics=metrics
                        )
                    )
                metrics |= engine.step(step, frozen=() if trains_policy else (POLICY_GROUP,))
            if trains_policy:
                monitor.add_step(metrics)


def micro_batches(
    experience: Experience, minibatch: list[int], config: PPOConfig, setup: PPOSetup
) -> Iterator[ExperienceBatch]:
    """Yield a minibatch in micro-batches of this process, as tensors on its device."""
    accelerator = setup.run.accelerator
    backbone, trains_critic = setup.policy.backbone, setup.roles.trains_critic
    for part in plan_minibatch(experience.rollout, minibatch, backbone, config.micro_batch_tokens, accelerator):
        yield experience.batch(part, minibatch, accelerator.device, trains_critic)


def policy_and_critic_loss(
    roles: Roles, batch: ExperienceBatch, temperature: float, coefficients: LossCoefficients
) -> BatchLoss:
    """Return the loss of policy and critic on a micro-batch."""
    new = roles.policy(batch.prompt, batch.response, temperature, batch.prompt_of_response)
    return ppo_loss(new, batch, coefficients)


def critic_loss_alone(roles: Roles, batch: ExperienceBatch, temperature: float, coefficients: LossCoefficients) -> BatchLoss:
    """Return the value loss on a micro-batch, whose gradients do not reach the policy; arguments as above."""
    return critic_loss(roles.values(batch.prompt, batch.response, batch.prompt_of_response), batch, coefficients)


def measure_largest_micro_batch(config: PPOConfig, setup: PPOSetup) -> None:
    """Run the largest micro-batch of a large model once: a lack of memory then ends the run before the first update."""
    if not should_measure_memory(setup.engine):
        return
    batch, padded_tokens = largest_micro_batch(config, setup)
    coefficients = config.loss_coefficients(config.kl_coef)
    with measure_peak_memory(setup.engine, len(batch.response.lengths), padded_tokens):
        setup.engine.backward(policy_and_critic_loss(setup.roles, batch, config.temperature, coefficients), batch.weight)


def run_ppo(config: PPOConfig) -> Path:
    """Train a policy by PPO; return the best policy's folder. Raise a UserError for a mistake in settings or data."""
    inputs = PPOInputs(
        policy=ModelSource(config.model),
        reward_models=config.reward_model,
        functions=load_functions(config.reward_functions),
        extensions=configured_extensions(config),
        prompts=config.prompts,
        validation=config.validation_prompts,
    )
    with prepare(config, inputs) as setup:
        return train(config, setup)


if __name__ == "__main__":
    run_stage(PPOConfig, run_ppo)
