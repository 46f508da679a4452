"""From a rollout to experience: log-probs and values of every role, per-token rewards, advantages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batches.micro_batches import MicroBatch, group_batches, group_tokens, pack_groups, prompt_groups
from align.core.seeds import Stream, generator
from align.core.tensor_ops import Padded, length_mask, whiten
from align.models.backbone import Backbone
from align.models.roles import Roles
from align.ppo.advantages import gae, grpo, reinforce_plus_plus, rloo, shape_rewards
from align.ppo.config import PPOConfig
from align.ppo.losses import importance_weights
from align.ppo.rollout import Rollout
from align.runtime.distributed import gather_rows


@dataclass(frozen=True)
class RoleOutputs:
    """Outputs of policy, reference and critic for a rollout; [B, T] float32 on the CPU, 0 past a response's end."""

    log_probs: Tensor
    reference: Tensor
    values: Tensor
    entropy: Tensor
    start: Tensor | None = None
    """Log-probs of the starting model, where the reference is another one."""


@dataclass(frozen=True)
class Experience:
    """A shaped rollout for the loss: the whole global batch, the same on every process."""

    rollout: Rollout
    scores: Tensor
    """[B] of whole responses, the training signal."""
    role_outputs: RoleOutputs
    lengths: Tensor
    """[B] response tokens."""
    advantages: Tensor
    """[B, T] from the estimator."""
    returns: Tensor | None
    """[B, T] from unwhitened advantages; None without a critic."""
    beta: float
    """The coefficient of the KL penalty."""
    importance: Tensor | None = None
    """[B, T] weights of the policy's losses; None: all are 1."""

    @property
    def mask(self) -> Tensor:
        """[B, T] True on response tokens."""
        return length_mask(self.lengths, self.advantages.shape[1])


class ScoredRollout(NamedTuple):
    """A rollout with its scores, for learning and logging."""

    experience: Experience
    rewards: Tensor
    """[B] scores on the scale of the rewards."""
    rewards_by_name: dict[str, Tensor]
    """Each reward [B]."""
    violations: dict[str, Tensor]
    """How likely each response violates each rule [B], by the rule's id."""

    @property
    def parts(self) -> dict[str, Tensor]:
        """All parts of the score [B], by name."""
        return self.rewards_by_name | {f"rule/{rule}": broken for rule, broken in self.violations.items()}


def minibatches(config: PPOConfig, rollout: Rollout, update: int, epoch: int) -> list[list[int]]:
    """The rows of each minibatch of an epoch over the rollout, reshuffled each time; a prompt's samples stay together."""
    samples = config.samples_per_prompt
    order = generator(config.seed, Stream.MINIBATCH_ORDER, update, epoch).permutation(len(rollout) // samples).tolist()
    parts = (order[number :: config.minibatches] for number in range(config.minibatches))
    return [[prompt * samples + sample for prompt in part for sample in range(samples)] for part in parts]


def plan_minibatch(
    config: PPOConfig, rollout: Rollout, rows: Sequence[int], backbone: Backbone, accelerator: Accelerator
) -> list[MicroBatch]:
    """A minibatch cut into micro-batches of this process, each prompt with all of its responses."""
    prompts = [prompt.ids for prompt in rollout.prompts]
    groups = prompt_groups(backbone, prompts, rollout.responses, rows, config.micro_batch_tokens)
    sizes = group_tokens(backbone, prompts, rollout.responses, groups)
    return group_batches(groups, sizes, config.micro_batch_tokens, accelerator)


def pack_rollout(rollout: Rollout, rows: Sequence[int], device: torch.device) -> tuple[Padded, Padded, Tensor | None]:
    """Prompts and responses of some rows, and each response's prompt index, ready for a module."""
    return pack_groups([prompt.ids for prompt in rollout.prompts], rollout.responses, rows, device)


@torch.no_grad()
def compute_role_outputs(
    config: PPOConfig,
    rollout: Rollout,
    batches: Sequence[list[int]],
    backbone: Backbone,
    roles: Roles,
    accelerator: Accelerator,
) -> RoleOutputs:
    """Log-probs of policy and reference, values and entropy of every response token; the same on every process.

    Args:
        batches: the rows, as the first epoch of learning will batch them: the same kernels then see the same shapes, and
            the ratio at the first minibatch is 1 in every number format.
        backbone: the policy's.
    """
    scored: dict[int, Tensor] = {}
    for rows in batches:
        for batch in plan_minibatch(config, rollout, rows, backbone, accelerator):
            prompt, response, prompt_index = pack_rollout(rollout, batch.rows, accelerator.device)
            policy = roles.policy(prompt, response, config.temperature, prompt_index)
            reference = roles.reference(prompt, response, config.temperature, prompt_index)
            outputs = [policy.log_probs, reference, policy.values, policy.entropy]
            if roles.reference_moves:
                outputs.append(roles.start(prompt, response, config.temperature, prompt_index))
            columns = torch.stack([column.float() for column in outputs])
            if batch.weight:
                for index, row in enumerate(batch.rows):
                    scored[row] = columns[:, index, : len(rollout.responses[row])].cpu()
    everywhere = dict(gather_rows(list(scored.items()), accelerator))
    rows_of = zip(*(everywhere[row] for row in range(len(rollout))), strict=True)
    padded = [torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True) for column in rows_of]
    return RoleOutputs(*padded)


def estimate_advantages(config: PPOConfig, rewards: Tensor, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """Advantages [B, T] by the estimator of `config.advantages`, and returns [B, T] if there is a critic."""
    if config.advantages == "gae":
        return gae(rewards, values, lengths, config.gamma, config.lam)
    if config.advantages == "reinforce++":
        return reinforce_plus_plus(rewards, lengths, config.gamma), None
    estimator = rloo if config.advantages == "rloo" else grpo
    return estimator(rewards, lengths, config.samples_per_prompt), None


def build_experience(config: PPOConfig, rollout: Rollout, scores: Tensor, roles: RoleOutputs, beta: float) -> Experience:
    """Rewards from the scores [B] to learn from and KL, advantages and returns; the same on every process."""
    lengths = rollout.lengths
    penalty = beta if config.kl_penalty == "reward" else 0.0
    rewards = shape_rewards(scores, roles.log_probs, roles.reference, lengths, penalty)
    mask = length_mask(lengths, rewards.shape[1])
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = estimate_advantages(config, rewards, roles.values, lengths)
    importance, engine_log_probs = None, rollout.engine_log_probs
    if config.importance_cap and engine_log_probs is not None:
        importance = importance_weights(roles.log_probs, engine_log_probs, config.importance_cap)
    return Experience(rollout, scores, roles, lengths, advantages, returns, beta, importance)
