"""Compare two policies on the same prompts with the same random numbers: rewards, paired difference, KL, best-of-n."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, log

import numpy as np
import torch
from accelerate import Accelerator

from align.batches.encoding import decoded_turn
from align.batches.micro_batches import MicroBatch, group_tokens, map_groups, pack_groups, prompt_groups
from align.core.seeds import RngStream, SeedKey
from align.core.statistics import mean_interval
from align.data.records import Prompt
from align.eval.answers import sampled_responses
from align.models.heads import response_log_probs
from align.models.loading import LoadedModel, load_frozen, load_tokenization
from align.ppo.losses import kl_estimate
from align.reward.checkpoint import LoadedReward
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import computes_on_cpu
from align.runtime.progress import ProgressDisplay
from align.sampling.generation import SamplingParams, row_uniforms, sample
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedPrompt, SampledResponse

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class PolicyResponses:
    """Answers of one policy with their rewards. Answers to the same prompt are adjacent."""

    answers: list[SampledResponse]
    rewards: list[float]

    @property
    def texts(self) -> list[str]:
        """The text of each answer."""
        return [answer.text for answer in self.answers]


@dataclass(frozen=True)
class PolicyComparison:
    """Two policies on the same prompts.

    Attributes:
        samples: number of answers to each prompt.
        gain: mean reward of `after` minus mean reward of `before`, with its 95 % interval over prompts.
        kl: KL(after || before) of a response in nats, by the k3 estimator on `after`'s responses.
    """

    prompts: list[Prompt]
    samples: int
    before: PolicyResponses
    after: PolicyResponses
    gain: float
    gain_low: float
    gain_high: float
    kl: float


def compare_policies(
    before: str,
    after: str,
    reward: LoadedReward,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seed: int,
    samples: int = 4,
    dtype: str = "auto",
    max_prompt_tokens: int | None = None,
    chat_template: str = "auto",
) -> PolicyComparison:
    """Sample answers of two policies to the same prompts, and score them.

    Args:
        before: folder or name of a policy.
        after: another one, with the same tokenizer.
        reward: reward model of the answers. Its mean over demonstrations is subtracted.
        seed: seed of the sampling noise, which both policies share.
        max_prompt_tokens: maximum prompt length. Longer prompts are left out.
        chat_template: chat template of both policies.
    """
    accelerator = Accelerator(cpu=computes_on_cpu())
    policies = [load_frozen(name, dtype, chat_template, accelerator.device) for name in (before, after)]
    if max_prompt_tokens is not None:
        read = policies[0].tokenization
        prompts = [prompt for prompt in prompts if len(read_prompt(prompt, read).ids) <= max_prompt_tokens]
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    first, second = (
        sample_and_score(policy, reward, repeated, sampling, (seed, RngStream.POLICY_COMPARISON), accelerator)
        for policy in policies
    )
    rewards = torch.tensor([first.rewards, second.rewards], dtype=torch.float64).view(2, len(prompts), samples).mean(-1)
    difference = rewards[1] - rewards[0]
    low, high = mean_interval(difference.numpy())
    kl = response_kl(policies[1], policies[0], second.answers, sampling.temperature, accelerator)
    return PolicyComparison(list(prompts), samples, first, second, float(difference.mean()), low, high, sum(kl) / len(kl))


def best_responses(
    policy: str,
    reward: LoadedReward,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    seed: int,
    dtype: str = "auto",
) -> PolicyResponses:
    """Return the highest-reward answer of n for each prompt (best-of-n sampling)."""
    accelerator = Accelerator(cpu=computes_on_cpu())
    loaded = load_frozen(policy, dtype, device=accelerator.device)
    repeated = [prompt for prompt in prompts for _ in range(n)]
    drawn = sample_and_score(loaded, reward, repeated, sampling, (seed, RngStream.BEST_OF), accelerator)
    best = [i + max(range(n), key=lambda k: drawn.rewards[i + k]) for i in range(0, len(repeated), n)]
    return PolicyResponses([drawn.answers[i] for i in best], [drawn.rewards[i] for i in best])


def judged_win_rates(comparison: PolicyComparison, judge: LoadedReward, policy: str) -> np.ndarray:
    """Return the fraction of each prompt's pairs in which a judge prefers the second policy [prompts]. Ties count as half.

    `policy` is the folder or name of either policy, for their common tokenizer.
    """
    accelerator, tokenization = Accelerator(cpu=computes_on_cpu()), load_tokenization(policy)
    scorer = RewardModelScorer.from_loaded(judge, tokenization, accelerator, BATCH_TOKENS)
    scores = [scorer(side.answers) for side in (comparison.before, comparison.after)]
    wins: np.ndarray = (np.sign(np.subtract(scores[1], scores[0])) + 1) / 2
    rates: np.ndarray = wins.reshape(-1, comparison.samples).mean(1)
    return rates


def sample_and_score(
    policy: LoadedModel,
    reward: LoadedReward,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    noise: SeedKey,
    accelerator: Accelerator,
) -> PolicyResponses:
    """Sample one answer per prompt from the random stream `noise`, and score it."""
    encoded = [read_prompt(prompt, policy.tokenization) for prompt in prompts]
    ids = [prompt.ids for prompt in encoded]
    uniforms = row_uniforms(len(prompts), sampling, *noise)
    ends = policy.tokenization.end_ids
    with ProgressDisplay("responses", len(ids), enabled=accelerator.is_main_process, transient=True) as progress:
        responses = sample(policy.backbone, ids, uniforms, sampling, ends, progress.advance).ids
    scorer = RewardModelScorer.from_loaded(reward, policy.tokenization, accelerator, BATCH_TOKENS)
    answers = sampled_responses(encoded, responses, policy.tokenization)
    return PolicyResponses(answers, scorer(answers))


def read_prompt(prompt: Prompt, tokenization: Tokenization) -> EncodedPrompt:
    """Return the token ids of a prompt for a policy, from the data if present, else from its text."""
    if prompt.ids is None:
        return EncodedPrompt(prompt.prompt, tokenization.prompt_ids(prompt.prompt))
    ids = list(prompt.ids)
    return EncodedPrompt(prompt.prompt or decoded_turn(ids, tokenization), ids, given_as_ids=True)


def response_kl(
    policy: LoadedModel,
    reference: LoadedModel,
    answers: Sequence[SampledResponse],
    temperature: float,
    accelerator: Accelerator,
) -> list[float]:
    """KL(policy || reference) of each answer sampled at `temperature`, summed over tokens (k3 estimator)."""
    contexts, ids = [answer.prompt_ids for answer in answers], [answer.ids for answer in answers]

    @torch.no_grad()
    def batch_kl(batch: MicroBatch) -> list[float]:
        inputs = pack_groups(contexts, ids, batch.groups, accelerator.device)
        mask, log_probs = inputs.response.mask(), []
        for backbone in (policy.backbone, reference.backbone):
            hidden = backbone.hidden(inputs.prompt, inputs.response, inputs.prompt_of_response)
            log_probs.append(response_log_probs(backbone, hidden, inputs.response, mask, temperature)[0])
        k3 = kl_estimate(log_probs[0], log_probs[1], "k3")
        return k3.sum(1).tolist()

    groups = prompt_groups(policy.backbone, contexts, ids, range(len(ids)), BATCH_TOKENS)
    costs = group_tokens(policy.backbone, contexts, ids, groups)
    return map_groups(groups, costs, BATCH_TOKENS, accelerator, batch_kl)


# -------------------------------------------------------------------------------------------- best of n in closed form


def kl_bound(n: int) -> float:
    """Upper bound of the KL of best-of-n sampling, in nats: log n - (n - 1) / n.

    Stated by Stiennon et al. 2020 (appendix G.3) as the KL; Beirami et al. 2024 show that it is an upper bound.
    """
    return log(n) - (n - 1) / n


@cache
def _best_probabilities(samples: int, n: int) -> tuple[float, ...]:
    """Probability of each sample, in ascending order, to be the largest of n drawn without replacement."""
    return tuple(comb(rank, n - 1) / comb(samples, n) for rank in range(samples))


def expected_best(rewards: np.ndarray, values: np.ndarray, n: int) -> float:
    """Unbiased estimate of the expected value of the highest-reward answer of n, from N >= n answers.

    It is the mean over all subsets of n of the N answers, in closed form by order statistics. Answers of equal reward
    share their probabilities.

    Args:
        rewards: [N] rewards for choosing the answer.
        values: [N] values averaged over the chosen answers: the same rewards, or another model's.
    """
    order = np.argsort(rewards, kind="stable")
    probabilities = np.array(_best_probabilities(len(rewards), n))
    _, group = np.unique(rewards[order], return_inverse=True)
    shared = np.bincount(group, probabilities) / np.bincount(group)
    return float(shared[group] @ values[order])


def sizes_on_curve(samples: int) -> list[int]:
    """Return the n of a best-of-n curve: powers of two up to `samples`, and `samples`."""
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
