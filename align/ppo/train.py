"""PPO with a KL penalty. This file is the loop, and the program that a launcher starts:

    accelerate launch align/ppo/train.py --config configs/ppo/smollm2-135m.yaml

An update samples responses and scores them. It computes log-probs of policy and reference and the critic's values,
then advantages from scores and KL penalty. It trains policy and critic for several epochs. docs/architecture.md lists
the files on the way from a prompt to a weight update.

The names of this file, in the order of an update:

    run          the run folder, its log, devices and processes (`Run`)
    setup        models, engine, sampler, prompts and extensions, made by `prepare` (`PPOSetup`)
    extensions   optional features, which the loop calls at the four lines marked "# extensions" (`Extensions`)
    state        the KL coefficient and the other values that change from update to update (`PPOState`)
    evaluator    evaluates the policy on fixed prompts and keeps the best one (`Evaluator`)
    rollout      B prompts, each with a sampled response (`Rollout`)
    scores       [B] rewards of whole responses; `training_scores` are those after the changes of extensions
    old          log-probs of policy and reference, values and entropy before the update, [B, T] each (`RoleOutputs`)
    experience   the rollout with scores, `old`, advantages and returns (`Experience`)
    minibatch    rows of the rollout, for one optimizer step
    rows         of a minibatch, for one forward and backward pass on this process (a micro-batch)
    sums         metrics of a micro-batch that add up over micro-batches and processes
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from align.core.launch import run_stage
from align.core.seeds import RngStream
from align.core.tensor_ops import length_mask, masked_sum, whiten
from align.ppo.actor_critic import POLICY_GROUP
from align.ppo.advantages import add_kl_penalty, advantages_and_returns, estimate_advantages, min_advantage_std
from align.ppo.config import PPOConfig
from align.ppo.evaluation import Evaluator
from align.ppo.extensions import configured_extensions
from align.ppo.flops import phase_flops, rollout_lengths
from align.ppo.inputs import PPOInputs
from align.ppo.losses import KLController, kl_estimate, ppo_loss, value_losses
from align.ppo.metrics import CollapseWatch, MissingEosWatch, NegativeKLWatch, check_ratio, response_kl, rollout_metrics
from align.ppo.records import Experience, RoleOutputs, Rollout
from align.ppo.reward_functions import load_functions
from align.ppo.rewards import apply_missing_eos
from align.ppo.rollout import (
    forward_all_roles,
    pack_rollout,
    plan_minibatch,
    prompts_of_update,
    sample_rollout,
    shuffled_minibatches,
)
from align.ppo.setup import PPOSetup, largest_micro_batch, prepare, save_if_scoring_fails
from align.ppo.value_regression import ValueRegression
from align.runtime.flops import Clock
from align.training.checkpoint import Checkpoint, Stateful
from align.training.engine import NotFiniteError
from align.training.model_source import ModelSource
from align.training.start import measure_peak_memory, should_measure_memory, stop_on_nan


class PPOState:
    """The values that change from update to update besides the weights."""

    def __init__(self, config: PPOConfig) -> None:
        self.kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.negative_kl = NegativeKLWatch()
        self.collapse = CollapseWatch(stops=config.stop_on_collapse)
        self.missing_eos = MissingEosWatch(config.missing_eos_score)  # checkpoints lack it: it may warn again after a resume

    def stateful(self) -> dict[str, Stateful]:
        """Return the stateful objects by their names in a checkpoint; none has the name of an extension."""
        return {"kl": self.kl, "negative_kl": self.negative_kl, "collapse": self.collapse}


def train(config: PPOConfig, setup: PPOSetup) -> Path:
    """Run all updates from the last checkpoint on; return the folder of the best policy, or of the last."""
    run, extensions, state = setup.run, setup.extensions, PPOState(config)
    missing_eos = (config.missing_eos_penalty, config.missing_eos_score)
    evaluator = Evaluator(setup, config, config.total_updates, config.critic_warmup, missing_eos)
    checkpoint = Checkpoint(run, setup.engine, setup.stateful() | state.stateful() | evaluator.stateful())
    done = checkpoint.load()
    if config.dry_run:
        return run.end_dry_run(config.total_updates, done)
    if run.callbacks:
        run.callbacks.begin(done)
    # Run the largest micro-batch of a large model once: a lack of memory then ends the run before the first update.
    if done < config.total_updates and should_measure_memory(setup.engine):
        sizes = (config.total_updates, config.rollout_batch_size, config.samples_per_prompt, config.num_mini_batches)
        experience, rows, minibatch_tokens, padded_tokens = largest_micro_batch(setup, *sizes, config.has_critic)
        with measure_peak_memory(setup.engine, rows, padded_tokens):
            setup.engine.backward(*micro_batch_loss(config, setup, experience, rows, minibatch_tokens))
    evaluator.begin(done)
    run.open()  # locks the folder, unless a result above has been written to it already
    updates = run.updates(done + 1, config.total_updates, checkpoint)
    for update in extensions.updates(updates, done, run.accelerator):  # extensions: resume, early stop
        clock = Clock()
        experience = collect_experience(config, setup, state, update, clock)  # steps 1 to 4
        lengths = rollout_lengths(experience.rollout, setup.policy.backbone, config.micro_batch_tokens)
        with extensions.learning(update, experience, lengths) as learned:  # extensions: records, metrics, after the update
            clock.lap("record")
            penalty = config.kl_estimator if config.kl_in == "reward" else None
            metrics = rollout_metrics(experience, penalty, any(each.corrects_sampling for each in extensions))
            metrics |= update_policy(config, setup, experience, update)  # step 5
        setup.sampler.weights_changed()
        clock.lap("learn")
        # 6. Adapt the KL coefficient. While the policy is frozen, its KL must not change it.
        state.negative_kl.check(response_kl(experience))
        if update > config.critic_warmup:
            state.kl.update(metrics["kl/k1"], len(experience.rollout))
        epochs = metrics["policy/epochs"]
        phases = phase_flops(
            setup.flops_profiles, lengths, epochs, (config.epochs if setup.roles.trains_critic else epochs) - epochs
        )
        flops = sum(phases.values()) + learned["flops"]
        metrics |= learned | {"flops": flops} | clock.shares()
        metrics |= run.speed(float(experience.lengths.sum()), flops, metrics["time/update"])
        learning_flops = phases["learning"] + learned["flops"]
        metrics["speed/mfu_learn"] = run.mfu(learning_flops, metrics["time/learn"] * metrics["time/update"])
        if evaluator.is_due(update):
            metrics |= evaluator.evaluate(update)
        run.log(update, metrics)
        run.set_progress(f"reward {metrics['reward/mean']:.3f}, KL {metrics['kl/k1']:.2f}")
        with evaluator.naming_kept_policy():
            for warning in state.collapse.check(metrics, experience.scores, config.samples_per_prompt):
                run.print(warning)
    return evaluator.finish()


def collect_experience(config: PPOConfig, setup: PPOSetup, state: PPOState, update: int, clock: Clock) -> Experience:
    """Sample and score the responses of an update, and make the experience that the policy is trained on."""
    run, backbone, kl_coef = setup.run, setup.policy.backbone, state.kl.coef
    # 1. Sample responses from the policy.
    samples = config.samples_per_prompt
    prompts = prompts_of_update(setup.prompts, update, config.rollout_batch_size // samples, samples, config.seed)
    key = (config.seed, RngStream.ROLLOUT, update)
    rollout = sample_rollout(setup.sampler, setup.policy.tokenization, prompts, setup.sampling, key)
    clock.lap("sample")
    run.raise_if_stop_requested()
    # 2. Score them. The roles come later: a reward reads texts and ids. What reads log-probs is a `token_rewards` of step 4.
    with save_if_scoring_fails(run, rollout, update):
        scores, components = setup.rewards(rollout)
    # 3. Compute log-probs of policy and reference, and values, in the batches of the first epoch.
    minibatches = shuffled_minibatches(len(rollout), samples, config.num_mini_batches, update, 0, config.seed)
    how = (config.temperature, config.micro_batch_tokens, run.accelerator, setup.value_regression is not None)
    old = forward_all_roles(setup.roles, rollout, minibatches, backbone, *how)
    # 4. Compute advantages.
    with save_if_scoring_fails(run, rollout, update):
        signal = setup.extensions.training_signal(scores, rollout, old, components)  # extensions: scores and token rewards
    training_scores, token_rewards, token_weights = signal
    missing_eos = (rollout.ended_mask, config.missing_eos_penalty, config.missing_eos_score)
    scores, training_scores = (apply_missing_eos(each, *missing_eos) for each in (scores, training_scores))
    run.print(state.missing_eos.check(training_scores, rollout.ended_mask))
    if setup.value_regression and (update == 1 or config.value_fit == "every"):
        rewards = shape_rewards(config, training_scores, old, rollout.lengths, kl_coef, token_rewards)
        old = fit_values(setup.value_regression, rollout, old, rewards, config.gamma, config.samples_per_prompt)
    advantages, returns = compute_advantages(config, training_scores, old, rollout.lengths, kl_coef, token_rewards)
    clock.lap("score")
    outputs = (old, advantages, returns, kl_coef)
    return Experience(rollout, training_scores, *outputs, scores, components, token_weights)


def shape_rewards(
    config: PPOConfig,
    training_scores: Tensor,
    old: RoleOutputs,
    lengths: Tensor,
    kl_coef: float,
    extra_token_rewards: Tensor | None = None,
) -> Tensor:
    """Return the reward [B, T] of each token: `training_scores` [B] on the last one, and the KL penalty.

    Args:
        extra_token_rewards: [B, T] further rewards of tokens, of extensions; None: none.
    """
    coef = kl_coef if config.kl_in == "reward" else 0.0
    kl = kl_estimate(old.log_probs, old.ref_log_probs, config.kl_estimator)
    rewards = add_kl_penalty(training_scores, kl, lengths, coef)
    mask = length_mask(lengths, rewards.shape[1])
    if extra_token_rewards is not None:
        rewards = rewards + extra_token_rewards.masked_fill(~mask, 0.0)
    return whiten(rewards, mask, shift_mean=False) if config.whiten_rewards else rewards


def compute_advantages(
    config: PPOConfig,
    training_scores: Tensor,
    old: RoleOutputs,
    lengths: Tensor,
    kl_coef: float,
    extra_token_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [B, T], and returns [B, T] if there is a critic; arguments as for `shape_rewards`."""
    rewards = shape_rewards(config, training_scores, old, lengths, kl_coef, extra_token_rewards)
    totals = training_scores if extra_token_rewards is None else training_scores + extra_token_rewards.sum(1)
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


def update_policy(config: PPOConfig, setup: PPOSetup, experience: Experience, update: int) -> dict[str, float]:
    """Train policy and critic on an experience for several epochs; metrics are means over the policy's optimizer steps."""
    # 5. Train for several epochs over the rollout in minibatches, one optimizer step each.
    run, engine, rollout = setup.run, setup.engine, experience.rollout
    step_metrics: dict[str, list[float]] = {}
    policy_steps = 0
    step = (update - 1) * config.epochs * config.num_mini_batches
    counts = (len(rollout), config.samples_per_prompt, config.num_mini_batches)
    trains_policy = True
    for epoch in range(config.epochs):
        for number, minibatch in enumerate(shuffled_minibatches(*counts, update, epoch, config.seed)):
            trains_policy = trains_policy and epoch < config.num_ppo_epochs
            if not (trains_policy or setup.roles.trains_critic):
                break
            step += 1
            minibatch_tokens = float(experience.lengths[minibatch].sum())
            plan = plan_minibatch(rollout, minibatch, setup.policy.backbone, config.micro_batch_tokens, run.accelerator)
            loss_of = micro_batch_loss if trains_policy else critic_loss
            try:
                for rows in engine.micro_batches(plan):
                    engine.backward(*loss_of(config, setup, experience, rows, minibatch_tokens))
                metrics = dict(engine.sums)
                if epoch == number == 0:
                    run.print(check_ratio(metrics["ratio/abs_error"], run.accelerator.device))
                if trains_policy and 0 < config.max_update_kl < metrics["policy/approx_kl"]:
                    trains_policy = False  # this step and the remaining ones train the critic alone
                if trains_policy:
                    metrics |= setup.extensions.extra_loss((update, epoch, number), len(minibatch))  # extensions: losses
                metrics |= engine.step(step, frozen=frozenset() if trains_policy else frozenset({POLICY_GROUP}))
            except NotFiniteError as error:
                stop_on_nan(run, update, error, [{"row": row, "response": rollout.texts[row]} for row in minibatch])
            if trains_policy:
                policy_steps += 1
                for name, value in metrics.items():
                    step_metrics.setdefault(name, []).append(value)
    step_metrics["loss/total"] = step_metrics.pop("loss")
    means = {name: sum(values) / len(values) for name, values in step_metrics.items()}
    return means | {"policy/epochs": policy_steps / config.num_mini_batches}


def micro_batch_loss(
    config: PPOConfig, setup: PPOSetup, experience: Experience, rows: list[int], minibatch_tokens: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of some rows of a minibatch with `minibatch_tokens` response tokens, and metrics that add up."""
    device = setup.run.accelerator.device
    prompt, response, prompt_of_response = pack_rollout(experience.rollout, rows, device)
    new = setup.roles.policy(prompt, response, config.temperature, prompt_of_response)
    batch = experience.loss_inputs(rows, response.ids.shape[1], device)
    if not setup.roles.trains_critic:
        batch = batch._replace(returns=None)
    return ppo_loss(
        (new.log_probs, new.values, new.entropy),
        batch,
        response.mask(),
        minibatch_tokens,
        config.loss_coefficients(experience.kl_coef),
    )


def critic_loss(
    config: PPOConfig, setup: PPOSetup, experience: Experience, rows: list[int], minibatch_tokens: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the value loss alone, arguments as for `micro_batch_loss`; its gradients do not reach the policy."""
    device = setup.run.accelerator.device
    prompt, response, prompt_of_response = pack_rollout(experience.rollout, rows, device)
    batch = experience.loss_inputs(rows, response.ids.shape[1], device)
    values = setup.roles.values(prompt, response, prompt_of_response)
    assert batch.returns is not None
    coefficients = config.loss_coefficients(experience.kl_coef)
    losses, _ = value_losses(values, batch.old_values, batch.returns, coefficients.cliprange_value)
    return coefficients.vf_coef * masked_sum(losses, response.mask()) / minibatch_tokens, {}


def run_ppo(config: PPOConfig) -> Path:
    """Train a policy by PPO; return the best policy's folder. Raise a UserError for a mistake in settings or data."""
    rewards = (config.reward_model, load_functions(config.reward_functions), configured_extensions(vars(config)))
    setup = prepare(config, PPOInputs(ModelSource(config.model), *rewards, config.prompts, config.validation_prompts))
    with setup:
        return train(config, setup)


if __name__ == "__main__":
    run_stage(PPOConfig, run_ppo)
