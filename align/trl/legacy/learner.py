"""Training in a step of TRL 0.11's trainer, with this library's roles, losses and engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from align.batches.micro_batches import pack_groups
from align.core.tensor_ops import BatchLoss, masked_sum
from align.models.backbone import Backbone
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.losses import LossCoefficients, ppo_loss
from align.ppo.records import RoleOutputs
from align.ppo.rollout import forward_all_roles, plan_minibatch, shuffled_minibatches
from align.runtime.distributed import zero_stage
from align.training.engine import TrainEngine
from align.trl.config import InvalidArgumentError
from align.trl.legacy.config import PPOConfig
from align.trl.legacy.rollout import (
    Estimates,
    ScoredRollout,
    kl_of_distributions,
    kl_of_tokens,
    loss_inputs,
    minibatch_stats,
)


@dataclass
class Learner:
    """Computes log-probs, values and KL, and trains policy and value head.

    Attributes:
        config: settings of the trainer.
        policy: policy.
        reference: backbone of the reference. If None, the reference is the policy without its adapter.
        roles: modules of policy, value head and reference.
        engine: training engine.
        steps_done: number of calls of `train`.
    """

    config: PPOConfig
    policy: LoadedModel
    reference: Backbone | None
    roles: Roles
    engine: TrainEngine
    steps_done: int = 0

    @property
    def accelerator(self) -> Accelerator:
        """Accelerator of the engine."""
        return self.engine.accelerator

    def micro_batch_tokens(self, scored: ScoredRollout) -> int:
        """Return the number of padded tokens per forward pass in TRL."""
        return self.config.mini_batch_size * scored.longest

    def minibatches(self, rows: int, epoch: int) -> list[list[int]]:
        """Return the rows of each optimizer step of an epoch."""
        assert self.config.global_backward_batch_size is not None
        count = rows // self.config.global_backward_batch_size
        return shuffled_minibatches(
            rows, samples=1, num_mini_batches=count, update=self.steps_done, epoch=epoch, seed=self.config.seed
        )

    def forward(self, scored: ScoredRollout) -> RoleOutputs:
        """Return the log-probs [B, T] of policy and reference and the values [B, T] before the update."""
        minibatches = self.minibatches(len(scored.rollout), 0)
        tokens, backbone = self.micro_batch_tokens(scored), self.policy.backbone
        return forward_all_roles(self.roles, scored.rollout, minibatches, backbone, 1.0, tokens, self.accelerator)

    def kl(self, scored: ScoredRollout, old: RoleOutputs) -> Tensor:
        """Return the KL [B, T] to the reference per token, with the estimator in the settings."""
        if self.config.kl_penalty != "full":
            return kl_of_tokens(old.log_probs, old.ref_log_probs, self.config.kl_penalty)
        if zero_stage(self.accelerator) == 3:
            raise InvalidArgumentError("kl_penalty is 'full', which needs whole models: use ZeRO-1 or 2, or another penalty")
        policy = (self.policy.backbone, self.policy.adapter)
        reference = (self.reference or self.policy.backbone, None)
        tokens = self.micro_batch_tokens(scored)
        return kl_of_distributions(policy, reference, scored.rollout, tokens, self.accelerator)

    def train(self, scored: ScoredRollout, old: RoleOutputs, estimates: Estimates) -> dict[str, float]:
        """Train for several epochs. Return statistics averaged over optimizer steps."""
        config, rows = self.config, len(scored.rollout)
        step_stats: list[dict[str, float]] = []
        for epoch in range(config.ppo_epochs):
            step_stats += [self.optimize(scored, old, estimates, minibatch) for minibatch in self.minibatches(rows, epoch)]
            if config.early_stopping and step_stats[-1]["policy/policykl"] > 1.5 * config.target_kl:
                break
        self.steps_done += 1
        return {name: float(np.mean([stats[name] for stats in step_stats])) for name in step_stats[0]}

    def optimize(
        self, scored: ScoredRollout, old: RoleOutputs, estimates: Estimates, minibatch: Sequence[int]
    ) -> dict[str, float]:
        """Make an optimizer step and return its statistics."""
        config, device = self.config, self.accelerator.device
        limits = (config.cliprange, config.cliprange, config.cliprange_value)
        coefficients = LossCoefficients(*limits, config.vf_coef, ent_coef=0.0, kl_coef=0.0, kl_estimator=None)
        tokens = float(scored.mask[minibatch].sum())
        budget = self.micro_batch_tokens(scored)
        plan = plan_minibatch(scored.rollout, minibatch, self.policy.backbone, budget, self.accelerator)
        prompts = [prompt.ids for prompt in scored.rollout.prompts]
        for part in plan:
            inputs = pack_groups(prompts, scored.rollout.responses, part.groups, device)
            new = self.roles.policy(inputs.prompt, inputs.response, 1.0, inputs.prompt_of_response)
            mask = scored.mask[part.rows, : inputs.response.ids.shape[1]].to(device)
            batch = loss_inputs(old.log_probs, estimates, part.rows, mask, tokens)
            loss = ppo_loss(new, batch, coefficients)
            assert batch.returns is not None
            difference = new.log_probs - batch.old_log_probs
            extra = {
                "policy/entropy": new.entropy,
                "policy/approxkl": 0.5 * difference**2,
                "policy/policykl": -difference,
                "val/vpred": new.values,
                "val/error": (new.values - batch.returns) ** 2,
            }
            sums = {name: masked_sum(values.detach(), mask) / tokens for name, values in extra.items()}
            self.engine.backward(BatchLoss(loss.loss, {**loss.sums, **sums}), part.weight)
        sums_of_step = self.engine.reduce_gradients()
        skips = sums_of_step["ratio/mean"] > config.ratio_threshold
        if skips:
            self.engine.run.print(
                f"warning: the mean ratio {sums_of_step['ratio/mean']:.2f} exceeds ratio_threshold "
                f"{config.ratio_threshold:.2f}: the minibatch is skipped"
            )
            self.engine.drop_gradients()
        self.engine.step(1)
        trained = 0.0 if skips else 1.0
        stats = {
            "loss/policy": trained * sums_of_step["loss/policy"],
            "loss/value": trained * sums_of_step["loss/value"],
            "loss/total": trained * sums_of_step["loss"],
            "policy/clipfrac": sums_of_step["policy/clipfrac"],
            "val/clipfrac": sums_of_step["value/clipfrac"],
        }
        names = ("policy/entropy", "policy/approxkl", "policy/policykl", "val/vpred", "val/error")
        stats |= {name: sums_of_step[name] for name in names}
        return stats | minibatch_stats(estimates, scored.mask, minibatch)
