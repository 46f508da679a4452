"""The PPO loop: sample, score, shape, learn, adapt; evaluate on fixed prompts and keep the best policy."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from align.batches.micro_batches import prompt_groups
from align.core.errors import UserError
from align.core.seeds import SeedKey, Stream
from align.core.tensor_ops import masked_sum
from align.models.checkpoint import save_model, weights_of
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.config import PPOConfig
from align.ppo.evaluation import PolicyEvaluation
from align.ppo.experience import (
    Experience,
    ScoredRollout,
    build_experience,
    compute_role_outputs,
    minibatches,
    pack_rollout,
    plan_minibatch,
)
from align.ppo.losses import AdaptiveKL, KLController, kl_losses, policy_losses, value_losses
from align.ppo.metrics import MissingEosWatch, NegativeKLWatch, RoleFlopsProfiles, phase_flops, response_kl, rollout_metrics
from align.ppo.ptx import PtxLoss
from align.ppo.rewards import Rewards
from align.ppo.rollout import PromptIdentity, Rollout, prompts_of_update, sample_rollout, save_if_scoring_fails
from align.ppo.rollout_files import RolloutWriter, recorded_updates
from align.ppo.rule_terms import RuleTerms
from align.ppo.scores import ScoreShaping
from align.ppo.setup import ReferenceRefresh, largest_micro_batch
from align.runtime.distributed import largest, run_on_main
from align.runtime.flops import Clock
from align.sampling.engines import SamplingEngine, sampling_tokens
from align.sampling.generation import Sampling
from align.tokenization.encoded import EncodedPrompt
from align.training.broken_batch import stop_on_nan
from align.training.checkpoint import Checkpoint, Stateful
from align.training.engine import NotFiniteError, Sums, TrainEngine
from align.training.run import Run
from align.training.trial import can_try, memory_trial

METRIC_NAMES = {
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "entropy_loss": "loss/entropy",
    "kl_loss": "loss/kl",
    "ptx_loss": "loss/ptx",
}
"""Sums of the loss that have another name in metrics.jsonl."""


class PPOAlgorithm:
    """The PPO loop over models, prompts and rewards, which `align.ppo.trainer.PPOTrainer` prepares.

    Args:
        loaded: the policy.
        optimization: of the `ActorCritic`.
        validation: fixed prompts for evaluation; may be empty.
        judge: selects the policy that is kept; None: the rewards do.
    """

    def __init__(
        self,
        run: Run,
        config: PPOConfig,
        loaded: LoadedModel,
        optimization: TrainEngine,
        roles: Roles,
        shapes: RoleFlopsProfiles,
        rewards: Rewards,
        prompts: list[EncodedPrompt],
        validation: list[EncodedPrompt],
        engine: SamplingEngine,
        ptx: PtxLoss | None = None,
        judge: Rewards | None = None,
        rules: RuleTerms | None = None,
        refresh: ReferenceRefresh | None = None,
    ) -> None:
        self.run, self.config, self.loaded, self.optimization = run, config, loaded, optimization
        self.roles, self.shapes, self.rewards, self.ptx, self.engine = roles, shapes, rewards, ptx, engine
        self.prompts, self.validation, self.refresh = prompts, validation, refresh
        width = max((len(prompt.ids) for prompt in (*prompts, *validation)), default=0) + config.max_new_tokens
        # The smallest of all processes.
        at_once = -largest(-sampling_tokens(run.memory, loaded.backbone, width), run.accelerator)
        self.sampling = Sampling(config.max_new_tokens, config.temperature, batch_tokens=at_once)
        self.controller = KLController(config.kl_beta)
        if config.kl_target:
            self.controller = AdaptiveKL(config.kl_beta, config.kl_target, config.kl_horizon)
        self.score_shaping, self.negative_kl = ScoreShaping(config), NegativeKLWatch()
        self.missing_eos = MissingEosWatch(config.missing_eos_score if config.missing_eos == "replace" else None)
        self.clock = Clock()
        self.folder = run.folder / "model"
        self.rollouts = RolloutWriter(run, loaded.tokenization, recorded_updates(config.updates, config.rollout_updates))
        self.rules = rules or RuleTerms(config)
        self.evaluation = PolicyEvaluation(
            run, config, loaded.backbone, roles, rewards, self.rules, judge, self.save, self.folder
        )
        parts: dict[str, Stateful] = {
            "prompts": PromptIdentity(prompts),
            "kl": self.controller,
            "rules": self.rules,
            "scores": self.score_shaping,
            "negative_kl": self.negative_kl,
            "evaluation": self.evaluation,
        }
        if refresh:
            parts["reference"] = refresh
        self.checkpoint = Checkpoint(run, optimization, parts)

    def train(self) -> Path:
        """Run all updates from the last checkpoint on; returns the folder of the best policy."""
        done = self.checkpoint.load()
        if done < self.config.updates and can_try(self.optimization):
            self._try_largest_micro_batch()
        if not done and self.validation:
            self.run.log(0, self.evaluate(0))
        self.run.open()  # holds the folder before anything in it is removed
        self.rollouts.drop_after(done)
        for update in self.run.updates(done + 1, self.config.updates, self.checkpoint):
            if self.evaluation.should_stop:
                break
            metrics = self.run_update(update)
            if self.validation and (update % self.config.evaluate_every == 0 or update == self.config.updates):
                metrics |= self.evaluate(update)
            self.run.log(update, metrics)
            self.run.note(f"reward {metrics['reward/mean']:.3f}, KL {metrics['kl/k1']:.2f}")
        self.run.say(self.evaluation.warning())
        # A folder of an earlier run may be there. A shared disk may show it to some processes only.
        if self.evaluation.kept is None or not run_on_main(self.folder.exists, self.run.accelerator):
            self.run.say("no evaluation chose a best policy; the last one is kept")
            with self._averaged_weights():
                self.save(self.folder, {})
        return self.folder

    def _try_largest_micro_batch(self) -> None:
        """Run the largest micro-batch of this process and report its peak of memory."""
        found = largest_micro_batch(self.config, self.loaded.backbone, self.prompts, self.run.accelerator)
        device = self.run.accelerator.device
        loss = loss_of_minibatch(self.config, found.experience, found.minibatch, self.roles, device)
        with memory_trial(self.optimization, found.rows, found.tokens):
            self.optimization.backward(*loss(found.rows))

    def run_update(self, update: int) -> dict[str, float]:
        """One update: sample, score, shape, learn, adapt."""
        self.clock = Clock()
        collected = self.collect(update)
        experience = collected.experience
        self.rollouts.write(update, experience, collected.rewards, collected.parts)
        self.clock.lap("record")
        learned = self.learn(experience, update)
        ptx_flops = learned.pop("ptx_flops", 0.0) * self.config.epochs * self.config.minibatches
        self.engine.weights_changed()
        self.clock.lap("learn")
        metrics = rollout_metrics(experience, collected.rewards, collected.parts, self.config.importance_cap) | learned
        metrics |= self.score_shaping.metrics() | self.rules.metrics()
        self.negative_kl.check(response_kl(experience))
        if update > self.config.critic_warmup:  # while the policy is frozen, its KL must not change beta
            self.controller.adapt(metrics["kl/k1"], len(experience.rollout))
            self.rules.adapt(collected.violations)
        if self.refresh:
            self.refresh.after_update(update)
        return metrics | self._costs(experience.rollout, ptx_flops)

    def collect(self, update: int) -> ScoredRollout:
        """Sample, score and shape an update's rollout."""
        prompts = prompts_of_update(self.config, self.prompts, update)
        rollout = self._sample(prompts, (self.config.seed, Stream.ROLLOUT, update))
        self.clock.lap("sample")
        self.run.stop_if_requested()
        with save_if_scoring_fails(self.run, rollout, update):
            raw, parts = self.rewards(rollout)
            violations = self.rules.violations(rollout)
        scores = self.score_shaping.shape(raw, rollout, self.rules.score_to_learn(raw, violations))
        self.run.say(self.missing_eos.check(scores.learned, rollout.ended_mask))
        batches = minibatches(self.config, rollout, update, epoch=0)
        role_outputs = compute_role_outputs(
            self.config, rollout, batches, self.loaded.backbone, self.roles, self.run.accelerator
        )
        experience = build_experience(self.config, rollout, scores.learned, role_outputs, self.controller.beta)
        self.clock.lap("score")
        return ScoredRollout(experience, scores.reported, parts, violations)

    def learn(self, experience: Experience, update: int) -> dict[str, float]:
        """Epochs over a rollout; metrics are means over all minibatches."""
        totals: dict[str, list[float]] = {}
        steps_before = (update - 1) * self.config.epochs * self.config.minibatches
        for epoch in range(self.config.epochs):
            for number, rows in enumerate(minibatches(self.config, experience.rollout, update, epoch)):
                try:
                    sums = self._accumulate(experience, rows, (update, epoch, number))
                    step = self.optimization.step(steps_before + len(totals.get("loss", [])) + 1)
                except NotFiniteError as error:
                    texts = experience.rollout.texts
                    stop_on_nan(self.run, update, error, [{"row": row, "response": texts[row]} for row in rows])
                for name, value in (sums | step).items():
                    totals.setdefault(name, []).append(value)
        return {METRIC_NAMES.get(name, name): sum(values) / len(values) for name, values in totals.items()}

    def _accumulate(self, experience: Experience, rows: list[int], step_key: tuple[int, int, int]) -> dict[str, float]:
        """Add up the gradients of one minibatch; the ratio is checked on the first one of a rollout."""
        config, optimization, rollout = self.config, self.optimization, experience.rollout
        plan = plan_minibatch(config, rollout, rows, self.loaded.backbone, optimization.accelerator)
        loss = loss_of_minibatch(config, experience, rows, self.roles, optimization.accelerator.device)
        for part in optimization.micro_batches(plan):
            optimization.backward(*loss(part))
        sums = optimization.sums
        if self.ptx is not None:
            sums = sums | self.ptx.accumulate(optimization, self.roles, len(rows), step_key)
        if step_key[1:] == (0, 0):
            self.run.say(check_ratio(sums["ratio_error"], optimization.accelerator.device))
        return sums

    def _sample(self, prompts: list[EncodedPrompt], key: SeedKey) -> Rollout:
        return sample_rollout(self.engine, self.loaded.tokenization, prompts, self.sampling, key)

    def evaluate(self, update: int) -> dict[str, float]:
        """Evaluate on the fixed prompts, with the same noise each time."""
        with self._averaged_weights():
            rollout = self._sample(self.validation, (self.config.seed, Stream.VALIDATION_SAMPLES))
            return self.evaluation(update, rollout)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Use the averaged weights for evaluation and saving, if the run averages them."""
        if self.optimization.average is None:
            yield
            return
        with self.optimization.averaged_weights():
            self.engine.weights_changed()
            yield
        self.engine.weights_changed()

    def save(self, folder: Path, metrics: dict[str, float]) -> None:
        """Save the current policy; `self.folder` holds the run's result."""
        state = self.optimization.model_state()

        def write() -> None:
            weights = weights_of(self.loaded.backbone, state, "backbone.model.")
            card = {
                "title": "Policy trained by PPO",
                "stage": "ppo",
                "reward model": ", ".join(self.config.all_reward_models) or "none",
                **({"rule model": self.config.rule_model} if self.config.rule_model else {}),
                "chosen by": self.config.judge_model or "the reward that it was trained on",
            }
            card |= {name: f"{value:.4g}" for name, value in metrics.items()}
            save_model(folder, self.loaded, weights, card)

        run_on_main(write, self.run.accelerator)

    def _costs(self, rollout: Rollout, ptx_flops: float) -> dict[str, float]:
        """Where the time of an update went, and how fast it was."""
        shares, lengths = self.clock.shares(), [len(ids) for ids in rollout.responses]
        prompts, budget = [prompt.ids for prompt in rollout.prompts], self.config.micro_batch_tokens
        groups = prompt_groups(self.loaded.backbone, prompts, rollout.responses, range(len(rollout)), budget)
        work = [(len(prompts[rows[0]]), [lengths[row] for row in rows]) for rows in groups]
        flops = ptx_flops + sum(phase_flops(self.shapes, work, self.config.epochs).values())
        return shares | {"flops": flops} | self.run.speed(sum(lengths), flops, shares["time/update"])


EXACT_RATIO_TOLERANCE = 1e-4
"""On a processor the same kernels see the same shapes in scoring and in training: the ratio is 1 but for rounding."""
RATIO_WARNING, RATIO_LIMIT = 1e-3, 0.05
"""On a GPU, kernels may differ between the pass without and the pass with gradients. A mean ratio error of 0.001 in
bfloat16 is worth a warning; one of 0.05 is a quarter of the usual clip range and means that something else is wrong."""


def loss_of_minibatch(
    config: PPOConfig, experience: Experience, rows: list[int], roles: Roles, device: torch.device
) -> Callable[[list[int]], tuple[Tensor, Sums]]:
    """The PPO loss of a minibatch, as a function of the rows of one micro-batch; means are over the minibatch's tokens."""
    count = float(experience.lengths[rows].sum())

    def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
        prompt, response, prompt_index = pack_rollout(experience.rollout, part, device)
        width, mask = response.ids.shape[1], response.mask()

        def columns(values: Tensor) -> Tensor:
            return values[part, :width].to(device)

        new = roles.policy(prompt, response, config.temperature, prompt_index)
        old_log_probs, old_values = columns(experience.role_outputs.log_probs), columns(experience.role_outputs.values)
        clips = (config.clip, config.clip_high or None)
        policy, clipped = policy_losses(new.log_probs, old_log_probs, columns(experience.advantages), *clips)
        if experience.importance is not None:
            policy = policy * columns(experience.importance)
        terms, was_clipped = {"policy": (1.0, policy)}, {"policy": clipped}
        if experience.returns is not None:
            value, was_clipped["value"] = value_losses(
                new.values, old_values, columns(experience.returns), config.value_clip or math.inf
            )
            terms["value"] = (config.value_weight, value)
        if config.entropy_weight:
            terms["entropy"] = (-config.entropy_weight, new.entropy)
        if config.kl_penalty != "reward":
            reference = columns(experience.role_outputs.reference)
            terms["kl"] = (experience.beta, kl_losses(new.log_probs, reference, config.kl_penalty))
        means = {name: masked_sum(losses, mask) / count for name, (_, losses) in terms.items()}
        total = torch.stack([weight * means[name] for name, (weight, _) in terms.items()]).sum()
        with torch.no_grad():
            ratio = torch.exp(new.log_probs - old_log_probs)
            sums = {
                **{f"{name}_loss": mean for name, mean in means.items()},
                **{f"clipped/{name}": (where & mask).sum() / count for name, where in was_clipped.items()},
                "ratio/mean": masked_sum(ratio, mask) / count,
                "ratio_error": masked_sum((ratio - 1).abs(), mask) / count,
                # Schulman's k3 of the step within the update, old to new.
                "kl/step": masked_sum(ratio - 1 - torch.log(ratio), mask) / count,
            }
        return total, sums

    return loss_of_rows


def check_ratio(error: float, device: torch.device) -> str:
    """Check the ratio at the first minibatch of a fresh rollout, which must be 1; returns a warning or "".

    Args:
        error: mean of |ratio - 1| over tokens.
        device: where it was computed.

    Raises:
        UserError: if scoring and training do not agree.
    """
    exact = device.type == "cpu"
    problem = (
        f"the ratio at the first minibatch of a fresh rollout is off by {error:.2g} on average, not 1: the model computes "
        "different log-probs in training and in scoring (check for dropout and nondeterministic kernels)"
    )
    if not error <= (EXACT_RATIO_TOLERANCE if exact else RATIO_LIMIT):
        raise UserError(problem)
    return f"warning: {problem}" if error > RATIO_WARNING and not exact else ""
