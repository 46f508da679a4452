"""From a rollout to what PPO learns from: score it with every role, shape rewards, estimate advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batching import MicroBatch, family_batches
from align.distributed import gather_rows
from align.errors import UserError
from align.generation import generator
from align.models.backbone import Backbone
from align.models.roles import Prediction
from align.ppo.advantages import advantages_and_returns
from align.ppo.config import PPOConfig
from align.ppo.kl import kl_estimates
from align.ppo.rollout import MINIBATCH, Rollout
from align.ppo.shaping import settle_scores, shape_rewards
from align.shared_prompts import families, family_tokens, lay_together
from align.tensor_ops import Padded, length_mask, masked_mean, whiten
from align.training import Optimisation

MISMATCH_LIMIT = 0.1
"""Nats a token; bfloat16 and other kernels cost a hundredth of it or less, another model or temperature far more."""


@dataclass(frozen=True)
class RoleScores:
    """What policy, reference and critic say of a rollout; [B, T] float32 on the CPU, 0 past a response's end."""

    log_probs: Tensor
    reference: Tensor
    values: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Experience:
    """A shaped rollout: what the objective needs, for the whole global batch, on every process."""

    rollout: Rollout
    scores: Tensor
    """[B] of whole responses, after the rule for a missing end."""
    roles: RoleScores
    lengths: Tensor
    """[B] response tokens."""
    advantages: Tensor
    """[B, T] whitened."""
    returns: Tensor
    """[B, T] from unwhitened advantages."""

    @property
    def mask(self) -> Tensor:
        """[B, T] True on response tokens."""
        return length_mask(self.lengths, self.advantages.shape[1])


def minibatches(config: PPOConfig, rollout: Rollout, update: int, epoch: int) -> list[list[int]]:
    """The rows of each minibatch of an epoch over the rollout, shuffled anew each time; samples of a prompt go together."""
    each = config.samples_per_prompt
    order = generator(config.seed, MINIBATCH, update, epoch).permutation(len(rollout) // each).tolist()
    parts = (order[number :: config.minibatches] for number in range(config.minibatches))
    return [[prompt * each + sample for prompt in part for sample in range(each)] for part in parts]


def plan_minibatch(
    config: PPOConfig, rollout: Rollout, rows: Sequence[int], backbone: Backbone, accelerator: Accelerator
) -> list[MicroBatch]:
    """A minibatch cut into micro-batches of this process, each prompt with all of its responses."""
    prompts = [prompt.ids for prompt in rollout.prompts]
    together = families(backbone, prompts, rollout.responses, rows, config.micro_batch_tokens)
    costs = family_tokens(backbone, prompts, rollout.responses, together)
    return family_batches(together, costs, config.micro_batch_tokens, accelerator)


def tokens(rollout: Rollout, rows: Sequence[int], device: torch.device) -> tuple[Padded, Padded, Tensor | None]:
    """Prompts and responses of some rows, and whose prompt is whose, ready for a module."""
    return lay_together([prompt.ids for prompt in rollout.prompts], rollout.responses, rows, device)


@torch.no_grad()
def score_roles(
    config: PPOConfig,
    rollout: Rollout,
    update: int,
    backbone: Backbone,
    optimisation: Optimisation,
    reference: Callable[..., Tensor] | None,
) -> RoleScores:
    """Log-probs of policy and reference, values and entropy of every response token.

    The rows are batched exactly as the first epoch will batch them: the same kernels then see the same shapes, and the
    ratio at the first minibatch is 1 in every number format.

    Args:
        backbone: the policy's.
        reference: a model of its own, or None where the policy's backbone also plays the reference.
    """
    device = optimisation.accelerator.device
    found: list[tuple[int, list[Tensor]]] = []
    for rows in minibatches(config, rollout, update, 0):
        for batch in plan_minibatch(config, rollout, rows, backbone, optimisation.accelerator):
            prompt, response, owner = tokens(rollout, batch.rows, device)
            said: Prediction = optimisation.module("policy", prompt, response, config.temperature, owner)
            play = reference or optimisation.module
            frozen = play("reference", prompt, response, config.temperature, owner)
            columns = [column.float().cpu() for column in (said.log_probs, frozen, said.values, said.entropy)]
            if batch.weight:
                for place, row in enumerate(batch.rows):
                    length = len(rollout.responses[row])
                    found.append((row, [column[place, :length].clone() for column in columns]))
    whole = [columns for _, columns in sorted(gather_rows(found, optimisation.accelerator), key=lambda pair: pair[0])]
    padded = [torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True) for column in zip(*whole, strict=True)]
    return RoleScores(*padded)


def engine_mismatch(rollout: Rollout, log_probs: Tensor) -> dict[str, float]:
    """How far the engine that sampled is from the policy: `sampling/mismatch`, in nats a token; nothing if they are one.

    Args:
        log_probs: [B, T] of the policy.

    Raises:
        UserError: if they are further apart than number formats and kernels can bring them.
    """
    if rollout.log_probs is None:
        return {}
    rows = [torch.tensor(row) for row in rollout.log_probs]
    theirs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = length_mask(torch.tensor([len(row) for row in rows]), theirs.shape[1])
    mismatch = float(masked_mean(kl_estimates(theirs, log_probs)[1], mask))
    if not mismatch <= MISMATCH_LIMIT:
        raise UserError(
            f"the engine samples from another distribution than the policy ({mismatch:.2g} nats a token): does it serve the "
            "policy's architecture and configuration, and does it report log-probs at the sampling temperature "
            "(--logprobs-mode processed_logprobs)?"
        )
    return {"sampling/mismatch": mismatch}


def shape(config: PPOConfig, rollout: Rollout, raw_scores: Tensor, roles: RoleScores, beta: float) -> Experience:
    """Rewards from scores and KL, advantages and returns; the same on every process."""
    lengths = torch.tensor([len(response) for response in rollout.responses])
    ended = torch.tensor(rollout.ended)
    scores = settle_scores(raw_scores.float(), ended, config.missing_end, config.missing_end_score)
    rewards = shape_rewards(scores, roles.log_probs, roles.reference, lengths, beta)
    mask = length_mask(lengths, rewards.shape[1])
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = advantages_and_returns(rewards, roles.values, lengths, config.gamma, config.lam)
    return Experience(rollout, scores, roles, lengths, whiten(advantages, mask), returns)
