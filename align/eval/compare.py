"""Two policies side by side on the same prompts with the same noise: rewards, their paired difference, and KL."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from align.batching import over_families
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
from align.shared_prompts import families, family_tokens, lay_together

COMPARISON = 6
"""What the random numbers of `noise(seed, COMPARISON)` are for."""
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Said:
    """What one policy answered: texts, rewards, token ids, whether each answer ended; a prompt's answers together."""

    texts: list[str]
    rewards: list[float]
    ids: list[list[int]]
    ended: list[bool]


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same prompts.

    Attributes:
        samples: answers to each prompt.
        gain: mean reward of `after` less that of `before`; `gain_low` and `gain_high` bound it at
            95 % (bootstrap over prompts, of the means over a prompt's answers).
        kl: KL(after || before) of a response in nats, by the k3 estimator on `after`'s responses.
    """

    prompts: list[Prompt]
    samples: int
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
    samples: int = 4,
    dtype: str = "auto",
) -> Comparison:
    """Let two policies answer the same prompts, and score both.

    Args:
        before, after: folders or names of policies with the same tokenizer.
        reward: scores the answers; less its mean over demonstrations.
        seed: of the sampling noise, which both share.
        samples: answers to each prompt; more of them narrow the interval down to what prompts differ by.

    Raises:
        UserError: if a model cannot be loaded.
    """
    accelerator = Accelerator()
    policies = [load(ModelConfig(model=name), compute_dtype(dtype)) for name in (before, after)]
    for policy in policies:
        policy.backbone.requires_grad_(False).to(accelerator.device)
    asked = [prompt for prompt in prompts for _ in range(samples)]
    said = [answers(policy, reward, asked, sampling, seed, accelerator) for policy in policies]
    rewards = torch.tensor([one.rewards for one in said], dtype=torch.float64).view(2, len(prompts), samples).mean(-1)
    difference = rewards[1] - rewards[0]
    low, high = mean_interval(difference.numpy())
    contexts = [policies[1].tokenization.prompt_ids(prompt.prompt) for prompt in asked]
    kl = response_kl(policies[1], policies[0], contexts, said[1].ids, sampling.temperature, accelerator)
    return Comparison(list(prompts), samples, said[0], said[1], float(difference.mean()), low, high, sum(kl) / len(kl))


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
        prompt, response, owner = lay_together(contexts, ids, batch, accelerator.device)
        mask, both = response.mask(), []
        for backbone in (policy.backbone, reference.backbone):
            hidden = backbone.hidden(prompt, response, owner)
            both.append(response_log_probs(backbone, hidden, response, mask, temperature)[0])
        return kl_estimates(both[0], both[1])[1].sum(1).tolist()

    together = families(policy.backbone, contexts, ids, range(len(ids)), BATCH_TOKENS)
    costs = family_tokens(policy.backbone, contexts, ids, together)
    return over_families(together, costs, BATCH_TOKENS, accelerator, work)
