"""Statistics of a step under TRL's names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from align.ppo.records import RoleOutputs
from align.runtime.distributed import gather_rows
from align.trl.legacy.rollout import Estimates, ScoredRollout


def step_stats(
    scored: ScoredRollout,
    old: RoleOutputs,
    kl: Tensor,
    estimates: Estimates,
    train_stats: Mapping[str, float],
    kl_coef: float,
    with_arrays: bool,
) -> dict[str, Any]:
    """Return the statistics of a step over all processes.

    Args:
        scored: responses with scores and mask.
        old: log-probs and values before the update.
        kl: KL [B, T] to the reference per token.
        estimates: advantages and returns.
        train_stats: statistics averaged over optimizer steps.
        kl_coef: coefficient of the KL penalty.
        with_arrays: whether to include arrays.
    """
    mask, scores = scored.mask, scored.scores
    kl_of_responses = kl.masked_fill(~mask, 0.0).sum(1)
    variance = train_stats["returns/var"]
    stats: dict[str, Any] = {
        "objective/kl": float(kl_of_responses.mean()),
        "objective/kl_coef": kl_coef,
        "objective/entropy": float(-old.log_probs.masked_fill(~mask, 0.0).sum(1).mean()),
        "ppo/mean_non_score_reward": estimates.non_score_reward,
        "ppo/mean_scores": float(scores.mean()),
        "ppo/std_scores": standard_deviation(scores),
        **{f"ppo/{name}": value for name, value in train_stats.items()},
        "ppo/val/var_explained": 1.0 - train_stats["val/error"] / variance if variance else 0.0,
    }
    if with_arrays:
        stats |= {
            "objective/kl_dist": kl_of_responses.numpy(),
            "objective/logprobs": old.log_probs.numpy(),
            "objective/ref_logprobs": old.ref_log_probs.numpy(),
        }
    return stats


def text_stats(
    queries: Sequence[Tensor], responses: Sequence[Tensor], accelerator: Accelerator, with_arrays: bool
) -> dict[str, Any]:
    """Return statistics of query and response lengths over all processes."""
    pairs = [(float(len(query)), float(len(response))) for query, response in zip(queries, responses, strict=True)]
    lengths = torch.tensor(gather_rows(pairs, accelerator))
    stats: dict[str, Any] = {}
    for name, column in (("queries", lengths[:, 0]), ("responses", lengths[:, 1])):
        stats[f"tokens/{name}_len_mean"] = float(column.mean())
        stats[f"tokens/{name}_len_std"] = standard_deviation(column)
        if with_arrays:
            stats[f"tokens/{name}_dist"] = column.numpy()
    return stats


def reward_stats(rewards: Sequence[Any] | Tensor, accelerator: Accelerator) -> dict[str, Any]:
    """Return statistics of the rewards over all processes."""
    values = rewards.flatten() if isinstance(rewards, Tensor) else rewards
    gathered = torch.tensor(gather_rows([float(value) for value in values], accelerator))
    return {
        "env/reward_mean": float(gathered.mean()),
        "env/reward_std": standard_deviation(gathered),
        "env/reward_dist": gathered.numpy(),
    }


def standard_deviation(values: Tensor) -> float:
    """Return the unbiased standard deviation, or 0 for a single value."""
    return float(values.std()) if len(values) > 1 else 0.0


def negative_kl_warning(kl: float) -> str:
    """Return a warning if the KL is far below 0, or "" otherwise."""
    if kl >= -1.0:
        return ""
    return (
        f"warning: the KL is {kl:.2f} nats per response: responses were not sampled from the policy's own distribution, "
        "because of top_k, top_p, a temperature or min_length for example"
    )
