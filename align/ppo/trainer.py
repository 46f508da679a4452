"""PPO: sample, score, shape, learn, adapt; evaluate on fixed prompts and keep the best policy within the KL bound."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from align.encoding import EncodedPrompt
from align.engines.base import SamplingEngine, TransformersEngine
from align.errors import UserError
from align.generation import Sampling
from align.models.checkpoint import save_model, weights_of
from align.models.loading import Loaded
from align.ppo.config import PPOConfig
from align.ppo.costs import RoleShapes, update_flops
from align.ppo.experience import Experience, engine_mismatch, minibatches, plan_minibatch, score_roles, shape, tokens
from align.ppo.kl import AdaptiveKL, FixedKL, KLController, kl_estimates
from align.ppo.objective import policy_losses, value_losses
from align.ppo.ptx import Pretraining
from align.ppo.rewards import Rewards
from align.ppo.rollout import EVALUATION, ROLLOUT, Rollout, prompts_of_update, repetition, respond
from align.ppo.shaping import settle_scores
from align.ppo.watch import Drift, NegativeKLWatch
from align.run import Clock, Run
from align.shared_prompts import families
from align.supervised import stop_on_nan
from align.tensor_ops import masked_mean, masked_sum
from align.training import NotFiniteError, Optimisation, Sums, load_checkpoint, save_checkpoint

RATIO_TOLERANCE = 1e-4
"""How far the ratio may be from 1 before anything was learned from a rollout; always checked."""


class PPOTrainer:
    """One PPO run; `align.ppo.setup.run_ppo` builds it.

    Args:
        reference: the frozen model that KL is taken to, or None where the policy's backbone plays it too.
        ptx: demonstrations whose language-model loss is added, or None.
        engine: what samples; None: transformers with the policy itself.
    """

    def __init__(
        self,
        run: Run,
        config: PPOConfig,
        loaded: Loaded,
        optimisation: Optimisation,
        reference: nn.Module | None,
        rewards: Rewards,
        prompts: list[EncodedPrompt],
        validation: list[EncodedPrompt],
        ptx: Pretraining | None = None,
        engine: SamplingEngine | None = None,
    ) -> None:
        self.run, self.config, self.loaded, self.optimisation = run, config, loaded, optimisation
        self.reference, self.rewards, self.ptx = reference, rewards, ptx
        self.prompts, self.validation = prompts, validation
        self.engine = engine or TransformersEngine(optimisation, loaded)
        self.sampling = Sampling(config.max_new_tokens, config.temperature)
        self.controller: KLController = FixedKL(config.kl_beta)
        if config.kl_target:
            self.controller = AdaptiveKL(config.kl_beta, config.kl_target, config.kl_horizon)
        self.negative_kl, self.drift = NegativeKLWatch(), Drift()
        self.best = -math.inf
        self.clock = Clock()
        module: Any = optimisation.module  # an engine of DeepSpeed passes attributes through
        backbone, start = loaded.backbone, loaded.start_adapter
        self.shapes = RoleShapes(backbone.shape(loaded.adapter), backbone.shape(start), reward=rewards.shape)
        if config.critic == "separate":
            self.shapes = self.shapes._replace(critic=(module.critic or backbone).shape(module.critic_adapter))
        self.folder = run.folder / "model"

    def train(self) -> Path:
        """Run all updates from the last checkpoint on; gives the folder of the best policy."""
        done, progress = load_checkpoint(self.run, self.optimisation)
        if progress:
            self.controller.beta, self.best = progress["beta"], progress["best"]
            self.drift, self.negative_kl.count = Drift(progress["first_evaluation"]), progress["negative_kl"]
        elif self.validation:
            self.run.log(0, self.evaluate(0))
        for update in self.run.updates(done + 1, self.config.updates):
            figures = self.step(update)
            if self.validation and (update % self.config.evaluate_every == 0 or update == self.config.updates):
                figures |= self.evaluate(update)
            self.run.log(update, figures)
            self.run.note(f"reward {figures['reward/mean']:.3f}, KL {figures['kl/k1']:.2f}")
            if self.config.save_every and update % self.config.save_every == 0:
                self._checkpoint(update)
        if not self.folder.exists():
            self.run.say("no evaluation chose a best policy; the last one is kept")
            self.save(self.folder, {})
        return self.folder

    def step(self, update: int) -> dict[str, float]:
        """One update: sample, score, shape, learn, adapt."""
        self.clock = Clock()
        prompts = prompts_of_update(self.config, self.prompts, update)
        rollout = self._respond(prompts, (self.config.seed, ROLLOUT, update))
        self.clock.lap("sample")
        scores, parts = self.rewards(rollout)
        roles = score_roles(self.config, rollout, update, self.loaded.backbone, self.optimisation, self.reference)
        experience = shape(self.config, rollout, scores, roles, self.controller.beta)
        self.clock.lap("score")
        learned = self.learn(experience, update)
        self.engine.weights_changed()
        self.clock.lap("learn")
        figures = self.figures(experience, parts) | learned
        self.controller.adapt(figures["kl/k1"], len(rollout))
        return figures | self._shares(rollout)

    def learn(self, experience: Experience, update: int) -> dict[str, float]:
        """Epochs over a rollout; figures are means over all minibatches."""
        totals: dict[str, list[float]] = {}
        for epoch in range(self.config.epochs):
            for number, rows in enumerate(minibatches(self.config, experience.rollout, update, epoch)):
                plan = plan_minibatch(
                    self.config, experience.rollout, rows, self.loaded.backbone, self.optimisation.accelerator
                )
                try:
                    sums = self.optimisation.accumulate(plan, self._loss(experience, rows), more=self.ptx is not None)
                    if self.ptx is not None:
                        place = (update, epoch, number)
                        sums |= self.ptx.accumulate(self.optimisation, len(rows), place)
                    if epoch == 0 and number == 0:
                        self._check_ratio(float(sums["ratio_error"]))
                    step = self.optimisation.step((update - 1) * self.steps_an_update + len(totals.get("loss", [])) + 1)
                except NotFiniteError as error:
                    texts = experience.rollout.texts
                    stop_on_nan(self.run, update, error, [{"row": row, "response": texts[row]} for row in rows])
                for name, value in {**{key: float(value) for key, value in sums.items()}, **step}.items():
                    totals.setdefault(name, []).append(value)
        renamed = {
            "loss": "loss/total",
            "policy_loss": "loss/policy",
            "value_loss": "loss/value",
            "ptx_loss": "loss/ptx",
        }
        return {renamed.get(name, name): sum(values) / len(values) for name, values in totals.items()}

    @property
    def steps_an_update(self) -> int:
        """Optimiser steps for each rollout."""
        return self.config.epochs * self.config.minibatches

    def _loss(self, experience: Experience, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        """The PPO loss of a minibatch, as a function of the rows of one micro-batch; means are over its tokens."""
        config, device = self.config, self.optimisation.accelerator.device
        count = float(experience.lengths[rows].sum())

        def of(part: list[int]) -> tuple[Tensor, Sums]:
            prompt, response, owner = tokens(experience.rollout, part, device)
            width, mask = response.ids.shape[1], response.mask()

            def batch(column: Tensor) -> Tensor:
                return column[part, :width].to(device)

            said = self.optimisation.module("policy", prompt, response, config.temperature, owner)
            old = batch(experience.roles.log_probs)
            policy, policy_clipped = policy_losses(said.log_probs, old, batch(experience.advantages), config.clip)
            value, value_clipped = value_losses(
                said.values, batch(experience.roles.values), batch(experience.returns), config.value_clip
            )
            policy_loss, value_loss = masked_sum(policy, mask) / count, masked_sum(value, mask) / count
            with torch.no_grad():
                ratio = torch.exp(said.log_probs - old)
                sums = {
                    "policy_loss": policy_loss,
                    "value_loss": value_loss,
                    "clipped/policy": (policy_clipped & mask).sum() / count,
                    "clipped/value": (value_clipped & mask).sum() / count,
                    "ratio/mean": masked_sum(ratio, mask) / count,
                    "ratio_error": masked_sum((ratio - 1).abs(), mask) / count,
                    # Schulman's k3 of the step within the update, old to new.
                    "kl/step": masked_sum(ratio - 1 - torch.log(ratio), mask) / count,
                }
            return policy_loss + config.value_weight * value_loss, sums

        return of

    def _check_ratio(self, error: float) -> None:
        """At the first minibatch nothing has been learned yet: scoring and training must agree.

        Raises:
            UserError: if they do not.
        """
        if error > RATIO_TOLERANCE:
            raise UserError(
                f"the ratio at the first minibatch of a fresh rollout is off by {error:.2g} on average, not 1: the model "
                "gives other log-probs in training than in scoring (dropout, a kernel that is not deterministic?)"
            )

    def figures(self, experience: Experience, parts: dict[str, Tensor]) -> dict[str, float]:
        """Figures of a rollout; docs/metrics.md defines each.

        Raises:
            UserError: if KL has been negative for too long.
        """
        roles, mask, lengths = experience.roles, experience.mask, experience.lengths.float()
        k1, k3 = kl_estimates(roles.log_probs, roles.reference)
        kl = (k1 * mask).sum(1)
        self.negative_kl.check(kl)
        residual = masked_mean((experience.returns - roles.values) ** 2, mask)
        spread = masked_mean((experience.returns - masked_mean(experience.returns, mask)) ** 2, mask)
        rollout = experience.rollout
        return {
            **engine_mismatch(rollout, roles.log_probs),
            **{f"reward/{name}": float(values.mean()) for name, values in parts.items()},
            "reward/mean": float(experience.scores.mean()),
            "reward/std": float(experience.scores.std(correction=0)),
            "objective": float((experience.scores - self.controller.beta * kl).mean()),
            "kl/k1": float(kl.mean()),
            "kl/k3": float((k3 * mask).sum(1).mean()),
            "kl/beta": self.controller.beta,
            "entropy": float(masked_mean(roles.entropy, mask)),
            "text/length": float(lengths.mean()),
            "text/ended": sum(rollout.ended) / len(rollout),
            "text/repetition": sum(repetition(ids) for ids in rollout.responses) / len(rollout),
            "value/explained_variance": float(1 - residual / spread.clamp(min=1e-8)),
        }

    def _respond(self, prompts: list[EncodedPrompt], seed: tuple[int, ...]) -> Rollout:
        return respond(self.engine, self.loaded.tokenization, prompts, self.sampling, seed)

    @torch.no_grad()
    def evaluate(self, update: int) -> dict[str, float]:
        """Sample from the fixed prompts with fixed noise, score, keep the best policy, warn of drift."""
        rollout = self._respond(self.validation, (self.config.seed, EVALUATION))
        raw, _ = self.rewards(rollout)
        ended = torch.tensor(rollout.ended)
        scores = settle_scores(raw.float(), ended, self.config.missing_end, self.config.missing_end_score)
        whole = copy.copy(self.config)
        whole.minibatches = whole.samples_per_prompt = 1
        roles = score_roles(whole, rollout, 0, self.loaded.backbone, self.optimisation, self.reference)
        kl = (roles.log_probs - roles.reference).sum(1)
        figures = {
            "reward": float(scores.mean()),
            "reward_error": float(scores.std()) / math.sqrt(max(1, len(scores))) if len(scores) > 1 else 0.0,
            "kl": float(kl.mean()),
            "length": sum(len(ids) for ids in rollout.responses) / len(rollout),
            "ended": sum(rollout.ended) / len(rollout),
            "repetition": sum(repetition(ids) for ids in rollout.responses) / len(rollout),
        }
        for warning in self.drift.check(figures):
            self.run.say(f"warning: reward rose, but {warning}: read the samples before you trust it")
        rows = [
            {
                "prompt": list(p.conversation),
                "response": text,
                "reward": float(score),
                "ended": ended,
                "category": p.category,
            }
            for p, text, score, ended in zip(rollout.prompts, rollout.texts, scores, rollout.ended, strict=True)
        ]
        self.run.record("samples", rows, update)
        if update and figures["kl"] <= self.config.max_kl and figures["reward"] > self.best:
            self.best = figures["reward"]
            self.save(self.folder, figures | {"update": update})
        if update and self.config.keep_policies:
            self.save(self.run.folder / "policies" / f"update-{update:06d}", figures | {"update": update})
        return {f"validation/{name}": value for name, value in figures.items()}

    def save(self, folder: Path, figures: dict[str, float]) -> None:
        """Save the policy as it is now; in `self.folder`, as the run's result."""
        state = self.optimisation.model_state()
        if self.run.is_main:
            weights = weights_of(self.loaded.backbone, state, "backbone.model.")
            card = {
                "title": "Policy trained by PPO",
                "stage": "ppo",
                "reward model": self.config.reward_model or "none",
            }
            card |= {name: f"{value:.4g}" for name, value in figures.items()}
            save_model(folder, self.loaded, weights, card)
        self.run.accelerator.wait_for_everyone()

    def _checkpoint(self, update: int) -> None:
        progress = {
            "beta": self.controller.beta,
            "best": self.best,
            "first_evaluation": self.drift.state(),
            "negative_kl": self.negative_kl.count,
        }
        save_checkpoint(self.run, self.optimisation, update, progress)

    def _shares(self, rollout: Rollout) -> dict[str, float]:
        """Where the time of an update went, and how fast it was."""
        shares, lengths = self.clock.shares(), [len(ids) for ids in rollout.responses]
        prompts = [prompt.ids for prompt in rollout.prompts]
        together = families(
            self.loaded.backbone, prompts, rollout.responses, range(len(rollout)), self.config.micro_batch_tokens
        )
        work = [(len(prompts[rows[0]]), [lengths[row] for row in rows]) for rows in together]
        flops = update_flops(self.shapes, work, self.config.epochs)
        return shares | {"flops": flops} | self.run.speed(sum(lengths), flops, shares["time/update"])
