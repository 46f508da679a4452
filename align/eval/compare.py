"""Two policies side by side on the same prompts with the same noise: rewards, their paired difference, and KL."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from align.batching import over_rows
from align.config import ModelConfig
from align.data.records import Prompt
from align.distributed import compute_dtype
from align.eval.intervals import mean_interval
from align.generation import Sampling, noise, sample
from align.models.loading import Loaded, load
from align.models.roles import response_log_probs
from align.ppo.kl import kl_estimates
from align.reward.checkpoint import LoadedReward
from align.reward.scoring import Answer, RewardModelScorer
from align.tensor_ops import Padded

COMPARISON = 6
"""What the random numbers of `noise(seed, COMPARISON)` are for."""
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Said:
    """What one policy answered: texts, rewards, token counts, whether each answer ended, and token ids."""

    texts: list[str]
    rewards: list[float]
    ids: list[list[int]]
    ended: list[bool]


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same prompts.

    Attributes:
        gain: mean reward of `after` less that of `before`; `gain_low` and `gain_high` bound it at
            95 % (bootstrap over prompts).
        kl: KL(after || before) of a response in nats, by the k3 estimator on `after`'s responses.
    """

    prompts: list[Prompt]
    before: Said
    after: Said
    gain: float
    gain_low: float
    gain_high: float
    kl: float


def compare(
    before: str,
    after: str,
    reward: LoadedReward,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
    dtype: str = "auto",
) -> Comparison:
    """Let two policies answer the same prompts, and score both.

    Args:
        before, after: folders or names of policies with the same tokenizer.
        reward: scores the answers; less its mean over demonstrations.
        seed: of the sampling noise, which both share.

    Raises:
        UserError: if a model cannot be loaded.
    """
    accelerator = Accelerator()
    policies = [load(ModelConfig(model=name), compute_dtype(dtype)) for name in (before, after)]
    for policy in policies:
        policy.backbone.requires_grad_(False).to(accelerator.device)
    said = [answers(policy, reward, prompts, sampling, seed, accelerator) for policy in policies]
    difference = torch.tensor(said[1].rewards, dtype=torch.float64) - torch.tensor(said[0].rewards, dtype=torch.float64)
    low, high = mean_interval(difference.numpy())
    contexts = [policies[1].tokenization.prompt_ids(prompt.prompt) for prompt in prompts]
    kl = response_kl(policies[1], policies[0], contexts, said[1].ids, sampling.temperature, accelerator)
    return Comparison(list(prompts), said[0], said[1], float(difference.mean()), low, high, sum(kl) / len(kl))


def answers(
    policy: Loaded, reward: LoadedReward, prompts: Sequence[Prompt], sampling: Sampling, seed: int, accelerator: Accelerator
) -> Said:
    """Sample one answer to each prompt and score it."""
    ids = [policy.tokenization.prompt_ids(prompt.prompt) for prompt in prompts]
    uniforms = noise(len(prompts), sampling, seed, COMPARISON)
    found = sample(policy.backbone, ids, uniforms, sampling, policy.tokenization.end_ids)
    texts = [policy.tokenization.text(response) for response in found.ids]
    scorer = RewardModelScorer.of(reward, policy.tokenization, accelerator, BATCH_TOKENS)
    rows = zip(prompts, ids, found.ids, texts, strict=True)
    rewards = scorer([Answer(prompt.prompt, prompt_ids, response, text) for prompt, prompt_ids, response, text in rows])
    return Said(texts, rewards, found.ids, found.ended)


def response_kl(
    policy: Loaded,
    reference: Loaded,
    contexts: Sequence[list[int]],
    ids: Sequence[list[int]],
    temperature: float,
    accelerator: Accelerator,
) -> list[float]:
    """KL(policy || reference) of each response, summed over its tokens, by k3 on the policy's own responses.

    Args:
        contexts, ids: token ids of prompts and of the responses that the policy gave at `temperature`.
    """

    @torch.no_grad()
    def work(batch: list[int]) -> list[float]:
        prompt = Padded.from_lists([contexts[row] for row in batch]).to(accelerator.device)
        response = Padded.from_lists([ids[row] for row in batch]).to(accelerator.device)
        both = [
            response_log_probs(m.backbone, m.backbone.hidden(prompt, response), response, response.mask(), temperature)[0]
            for m in (policy, reference)
        ]
        return kl_estimates(both[0], both[1])[1].sum(1).tolist()

    costs = [len(context) + len(response) for context, response in zip(contexts, ids, strict=True)]
    return over_rows(costs, BATCH_TOKENS, accelerator, work)
