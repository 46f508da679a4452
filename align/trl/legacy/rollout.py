"""Responses of a step over all processes, and the inputs of the loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.batches.micro_batches import pack_groups
from align.core.tensor_ops import masked_mean
from align.models.backbone import Backbone
from align.models.vocabulary import vocabulary_rows
from align.ppo.advantages import add_kl_penalty, advantages_and_returns
from align.ppo.losses import LossInputs, kl_estimate
from align.ppo.records import Rollout
from align.ppo.rollout import plan_minibatch
from align.runtime.distributed import gather_rows
from align.tokenization.encoded import EncodedPrompt
from align.trl.config import InvalidArgumentError
from align.trl.legacy.config import PPOConfig
from align.trl.ppo_trainer import masked_var, masked_whiten


class ScoredResponse(NamedTuple):
    """A query, its response, its score and the mask of trained tokens."""

    query: list[int]
    response: list[int]
    score: float
    mask: list[bool]
    """Whether each response token is trained."""


@dataclass(frozen=True)
class ScoredRollout:
    """Responses of all processes, with scores [B] and the mask [B, T] of trained tokens on the CPU."""

    rollout: Rollout
    scores: Tensor
    mask: Tensor

    @property
    def longest(self) -> int:
        """Number of tokens in the longest query plus the longest response."""
        queries = max(len(prompt.ids) for prompt in self.rollout.prompts)
        return queries + int(self.rollout.lengths.max())


def scored_responses(
    count: int, queries: object, responses: object, scores: object, masks: object, start_id: int | None
) -> list[ScoredResponse]:
    """Check the arguments of `step` and convert them to rows.

    Args:
        count: number of rows.
        queries: token ids [L] of each query.
        responses: token ids [T] of each response.
        scores: score of each response.
        masks: mask [T] of trained tokens of each response. If None, all response tokens are trained.
        start_id: token to remove from the start of responses, if any.

    Raises:
        InvalidArgumentError: If an argument is not a list of `count` tensors with the right shape.
    """
    columns = {"queries": queries, "responses": responses, "scores": scores}
    columns |= {} if masks is None else {"response_masks": masks}
    for name, values in columns.items():
        if not isinstance(values, list):
            raise InvalidArgumentError(f"{name} must be a list of tensors - got {type(values)}")
        if not all(isinstance(value, Tensor) for value in values):
            wrong = next(value for value in values if not isinstance(value, Tensor))
            raise InvalidArgumentError(f"Elements in {name} must be tensors - got {type(wrong)}")
        if len(values) != count:
            raise InvalidArgumentError(
                f"Batch size ({count}) does not match number of examples - but got {len(values)} for: {name}"
            )
        if name == "scores" and (wrong := next((value for value in values if value.numel() != 1), None)) is not None:
            raise InvalidArgumentError(f"Scores must be single numbers - got the shape {list(wrong.shape)}")
        if name != "scores" and (wrong := next((value for value in values if value.dim() != 1), None)) is not None:
            raise InvalidArgumentError(f"Elements in {name} must have one dimension - got the shape {list(wrong.shape)}")
    rows = []
    for index in range(count):
        response = columns["responses"][index].tolist()  # type: ignore[index]
        mask = [bool(value) for value in masks[index].tolist()] if masks is not None else [True] * len(response)  # type: ignore[index]
        if len(mask) != len(response):
            raise InvalidArgumentError(f"response_masks: row {index} has {len(mask)} values for {len(response)} tokens")
        if response and response[0] == start_id:
            response, mask = response[1:], mask[1:]
        if not any(mask):
            raise InvalidArgumentError(f"responses: row {index} has no token to train; leave it out, or sample at least one")
        query, score = columns["queries"][index].tolist(), float(columns["scores"][index])  # type: ignore[index]
        if not math.isfinite(score):
            raise InvalidArgumentError(f"scores: row {index} is {score}, not a finite number")
        rows.append(ScoredResponse(query, response, score, mask))
    return rows


def gathered_rollout(rows: Sequence[ScoredResponse], backbone: Backbone, accelerator: Accelerator) -> ScoredRollout:
    """Gather the rows of all processes in rank order.

    Raises:
        UserError: If a row does not fit into the model's context, or has a token id outside the vocabulary.
    """
    gathered = gather_rows(list(rows), accelerator)
    known = vocabulary_rows(backbone.model)
    for index, row in enumerate(gathered):
        if wrong := [id for id in (*row.query, *row.response) if not 0 <= id < known]:
            raise InvalidArgumentError(f"row {index} has the token id {wrong[0]}; the model has the ids 0 to {known - 1}")
        backbone.require_fit(len(row.query), len(row.response), f"row {index}")
    prompts = [EncodedPrompt((), row.query, given_as_ids=True) for row in gathered]
    count = len(gathered)
    responses = [row.response for row in gathered]
    rollout = Rollout(prompts=prompts, responses=responses, ended=[True] * count, texts=[""] * count)
    mask = pad_sequence([torch.tensor(row.mask) for row in gathered], batch_first=True)
    return ScoredRollout(rollout, torch.tensor([row.score for row in gathered]), mask)


def kl_of_tokens(log_probs: Tensor, reference: Tensor, penalty: str) -> Tensor:
    """Return the KL estimate [B, T] of each sampled token. `penalty` is TRL's name of the estimator."""
    if penalty == "abs":
        return (log_probs - reference).abs()
    return kl_estimate(log_probs, reference, "k2" if penalty == "mse" else "k1")


@torch.no_grad()
def kl_of_distributions(
    policy: tuple[Backbone, str | None],
    reference: tuple[Backbone, str | None],
    rollout: Rollout,
    tokens: int,
    accelerator: Accelerator,
) -> Tensor:
    """Return the KL [B, T] between the next-token distributions of policy and reference.

    Args:
        policy: backbone and active adapter.
        reference: backbone and active adapter.
        rollout: responses.
        tokens: maximum number of padded tokens per forward pass.
        accelerator: accelerator of the run.
    """
    kl_of_rows: dict[int, Tensor] = {}
    prompts = [prompt.ids for prompt in rollout.prompts]
    for part in plan_minibatch(rollout, range(len(rollout)), policy[0], tokens, accelerator):
        inputs = pack_groups(prompts, rollout.responses, part.groups, accelerator.device)
        log_probs = []
        for backbone, adapter in (policy, reference):
            with backbone.adapter(adapter):
                states = backbone.hidden(inputs.prompt, inputs.response, inputs.prompt_of_response)[:, :-1]
                log_probs.append(backbone.logits(states).float().log_softmax(-1))
        kl = (log_probs[0].exp() * (log_probs[0] - log_probs[1])).sum(-1).cpu()
        if part.weight:
            kl_of_rows |= {row: kl[index, : len(rollout.responses[row])].clone() for index, row in enumerate(part.rows)}
    everywhere = dict(gather_rows(list(kl_of_rows.items()), accelerator))
    return pad_sequence([everywhere[row] for row in range(len(rollout))], batch_first=True)


@dataclass(frozen=True)
class Estimates:
    """Values, advantages and returns [B, T] of a step, and the mean non-score reward per token."""

    values: Tensor
    advantages: Tensor
    returns: Tensor
    non_score_reward: float


def estimate(config: PPOConfig, scored: ScoredRollout, kl: Tensor, values: Tensor, kl_coef: float) -> Estimates:
    """Compute advantages and returns. Tokens that are not trained have reward 0 and value 0.

    Args:
        config: settings of the trainer.
        scored: responses with scores and mask.
        kl: KL [B, T] per token.
        values: values [B, T] before each token.
        kl_coef: coefficient of the KL penalty.
    """
    mask = scored.mask
    values = values.masked_fill(~mask, 0.0)
    last = mask.shape[1] - mask.flip(1).long().argmax(1)  # [B] position after the last trained token
    rewards = add_kl_penalty(scored.scores, kl, last, kl_coef).masked_fill(~mask, 0.0)
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False).masked_fill(~mask, 0.0)
    advantages, returns = advantages_and_returns(rewards, values, scored.rollout.lengths, config.gamma, config.lam)
    whitened = masked_whiten(advantages, mask).masked_fill(~mask, 0.0)
    return Estimates(values, whitened, returns, -kl_coef * float(masked_mean(kl, mask)))


def loss_inputs(
    old_log_probs: Tensor, estimates: Estimates, rows: Sequence[int], mask: Tensor, minibatch_tokens: float
) -> LossInputs:
    """Return the inputs of `ppo_loss` for some rows.

    Args:
        old_log_probs: log-probs [B, T] of all rows before the update.
        estimates: estimates for all rows.
        rows: selected rows.
        mask: mask of the selected rows, on the device of the loss.
        minibatch_tokens: number of trained tokens in the minibatch.
    """

    def columns(tensor: Tensor) -> Tensor:
        return tensor[rows, : mask.shape[1]].to(mask.device)

    old = columns(old_log_probs)
    return LossInputs(
        mask=mask,
        old_log_probs=old,
        old_values=columns(estimates.values),
        ref_log_probs=old,  # the KL to the reference is part of the rewards
        advantages=columns(estimates.advantages),
        returns=columns(estimates.returns),
        minibatch_tokens=minibatch_tokens,
    )


def minibatch_stats(estimates: Estimates, mask: Tensor, rows: Sequence[int]) -> dict[str, float]:
    """Return TRL's statistics of the advantages, returns and values of a minibatch."""
    inside = mask[rows]
    several = int(inside.sum()) > 1

    def variance(values: Tensor) -> float:
        return float(masked_var(values[rows], inside)) if several else 0.0

    return {
        "policy/advantages_mean": float(masked_mean(estimates.advantages[rows], inside)),
        "returns/mean": float(masked_mean(estimates.returns[rows], inside)),
        "returns/var": variance(estimates.returns),
        "val/mean": float(masked_mean(estimates.values[rows], inside)),
        "val/var": variance(estimates.values),
    }
