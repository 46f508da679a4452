"""Scoring responses with a reward model, whoever wrote them and with whatever tokenizer."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batches.micro_batches import map_groups
from align.batches.shared_prompts import group_tokens, pack_groups, prompt_groups
from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone, flops_profile
from align.reward.checkpoint import LoadedReward
from align.runtime.flops import FlopsProfile, training_flops
from align.runtime.sharding import place_frozen_model
from align.tokenization import PairTokenization, Tokenization
from align.tokenization.encoded import EncodedPrompt, EncodedRanking, PromptResponse, SampledResponse, SharedPrompt
from align.training.memory_dry_run import BatchShape

PROMPTS_TRIED = 16
"""The longest prompts, in the policy's tokens, of which one is taken to be the longest in another model's tokens too."""

Ranked = TypeVar("Ranked", bound=SharedPrompt)

RewardFunctionOfTokens = Callable[[Padded, Padded, Tensor | None], Tensor]
"""Prompts [N], responses [R] and the prompt of each response [R] (None: one each) to rewards [R]."""


def group_sizes(backbone: Backbone, rankings: Sequence[SharedPrompt]) -> list[int]:
    """Tokens that each ranking, its prompt with all responses, holds in memory."""
    return [backbone.tokens_in_memory(len(item.prompt), list(map(len, item.responses))) for item in rankings]


def batch_shape_of(batch: Sequence[Ranked], predicted: Callable[[Ranked], Sequence[int]] | None = None) -> BatchShape:
    """The shape of a micro-batch of rankings.

    Args:
        predicted: tokens of each response of a ranking whose logits are taken; None: all, where any are.
    """
    tokens = None if predicted is None else sum(sum(predicted(item)) for item in batch)
    return BatchShape.from_lengths([(len(item.prompt), list(map(len, item.responses))) for item in batch], tokens)


def group_flops(
    backbone: Backbone,
    shape: FlopsProfile,
    ranking: SharedPrompt,
    flops: Callable[[FlopsProfile, int, Sequence[int], int], float] = training_flops,
    predicted: Sequence[int] = (),
) -> float:
    """FLOPs of reading a ranking.

    Args:
        flops: `training_flops`, or `forward_flops` where nothing is learned.
        predicted: tokens of each response that are predicted; empty: none.
    """
    lengths = list(map(len, ranking.responses))
    if backbone.shares_prompts:
        return flops(shape, len(ranking.prompt), lengths, sum(predicted))
    counts = predicted or [0] * len(lengths)
    return sum(flops(shape, len(ranking.prompt), [length], count) for length, count in zip(lengths, counts, strict=True))


def describe_rankings(tokenization: Tokenization, rankings: Sequence[EncodedRanking]) -> list[dict[str, object]]:
    """Rankings as texts, for the file of a batch that led to a NaN."""
    text = tokenization.text
    return [
        {"prompt": text(item.prompt), "responses": [text(ids) for ids in item.responses], "ranks": item.ranks}
        for item in rankings
    ]


def pack_rankings(rankings: Sequence[SharedPrompt], device: torch.device) -> tuple[Padded, Padded, Tensor]:
    """Rankings as `Backbone.hidden` takes them: prompts, the responses of all rankings in order, and `prompt_index`."""
    prompts = Padded.from_lists([item.prompt for item in rankings]).to(device)
    responses = Padded.from_lists([response for item in rankings for response in item.responses]).to(device)
    prompt_index = torch.tensor([number for number, item in enumerate(rankings) for _ in item.responses], device=device)
    return prompts, responses, prompt_index


def reward_rankings(module: RewardFunctionOfTokens, rankings: Sequence[SharedPrompt], device: torch.device) -> Tensor:
    """Rewards [R] of the responses of several rankings, in order; each prompt is read once if the backbone can share it."""
    return module(*pack_rankings(rankings, device))


def reads_ids_of(reward: LoadedReward, policy: Tokenization) -> bool:
    """Whether a reward model can read a policy's token ids as they are.

    Prompts and turns must be written alike. A classifier without a chat template has no form of its own: it reads whatever
    a policy with its vocabulary reads and writes.
    """
    own = reward.loaded.tokenization
    if reward.has_template or isinstance(own, PairTokenization):
        return own.reads_alike(policy)
    return not isinstance(policy, PairTokenization) and own.tokenizer.get_vocab() == policy.tokenizer.get_vocab()


class RewardModelScorer:
    """A frozen reward model that scores responses of a policy.

    Args:
        module: computes rewards from tokens.
        mean: subtracted from every reward.
        backbone: what `module` reads with.
        accelerator: processes that share the work.
        budget: padded tokens that are read at once.
        tokenization: the reward model's own, if it reads other token ids than the policy: texts are then tokenized again.
        shape: what the FLOPs of a score depend on; None: they are not counted.
        reads_whole_turns: see `LoadedReward`; needs `tokenization`.
    """

    def __init__(
        self,
        module: RewardFunctionOfTokens,
        mean: float,
        backbone: Backbone,
        accelerator: Accelerator,
        budget: int,
        tokenization: Tokenization | None = None,
        shape: FlopsProfile | None = None,
        reads_whole_turns: bool = False,
    ) -> None:
        self.module, self.mean, self.backbone, self.tokenization = module, mean, backbone, tokenization
        self.accelerator, self.budget, self.shape = accelerator, budget, shape
        self.reads_whole_turns = reads_whole_turns

    @classmethod
    def from_loaded(
        cls, reward: LoadedReward, policy: Tokenization, accelerator: Accelerator, budget: int
    ) -> "RewardModelScorer":
        """A scorer of a reward model from disk, for responses of a policy with the tokenization `policy`."""
        loaded = reward.loaded
        shape = flops_profile(loaded.backbone, loaded.adapter)
        module = place_frozen_model(reward.model, accelerator)
        alike = reads_ids_of(reward, policy) and not reward.reads_whole_turns
        own = None if alike else loaded.tokenization
        return cls(module, reward.mean, loaded.backbone, accelerator, budget, own, shape, reward.reads_whole_turns)

    def __call__(self, responses: Sequence[SampledResponse]) -> list[float]:
        """Rewards minus the mean over demonstrations; the same on every process.

        Raises:
            UserError: if a response is longer than the reward model can read.
        """
        return self.score_rows([self.encode(response) for response in responses])

    @torch.no_grad()
    def score_rows(self, rows: Sequence[PromptResponse]) -> list[float]:
        """`__call__` for prompts and responses in the model's own token ids; rows of one prompt are read together.

        Raises:
            UserError: if a row is longer than the reward model can read.
        """
        for row in rows:
            if not self.backbone.fits(len(row.prompt), len(row.response)):
                raise UserError(
                    f"the reward model cannot read {len(row.prompt)} prompt and {len(row.response)} response tokens; "
                    "lower max_prompt_tokens or max_new_tokens"
                )
        prompt_ids, response_ids = [row.prompt for row in rows], [row.response for row in rows]
        device = self.accelerator.device

        def score_batch(batch: list[int]) -> list[float]:
            rewards: list[float] = (self.module(*pack_groups(prompt_ids, response_ids, batch, device)) - self.mean).tolist()
            return rewards

        groups = prompt_groups(self.backbone, prompt_ids, response_ids, range(len(rows)), self.budget)
        sizes = group_tokens(self.backbone, prompt_ids, response_ids, groups)
        return map_groups(groups, sizes, self.budget, self.accelerator, score_batch)

    def encode(self, response: SampledResponse) -> PromptResponse:
        """A prompt and a response in the token ids of the reward model."""
        if self.tokenization is None:
            return PromptResponse(response.prompt_ids, response.ids)
        if self.reads_whole_turns:
            return PromptResponse(*self.tokenization.whole_turn_ids(response.conversation, response.text, response.ended))
        ids = self.tokenization.answer_ids(response.conversation, response.text, whole=False, ended=response.ended)
        return PromptResponse(*ids)

    def require_context(
        self, name: str, prompts: Sequence[EncodedPrompt], new_tokens: int, policy: Tokenization, after: int = 0
    ) -> None:
        """Refuse a context that is too short for the longest prompts with responses of the maximum length.

        Args:
            name: of the model, for the error.
            prompts: of the policy.
            new_tokens: of the longest response, in the policy's tokens. Other tokenizers' counts are estimated from how many
                tokens each makes of the prompts.
            policy: the policy's tokenization.
            after: tokens that the model reads behind a response, such as a rule.

        Raises:
            UserError: with the numbers of tokens.
        """
        longest = sorted(prompts, key=lambda prompt: len(prompt.ids))[-PROMPTS_TRIED:]
        if self.tokenization is not None:
            text = "\n".join(message["content"] for prompt in longest for message in prompt.conversation)
            ratio = len(self.tokenization.template_ids(text)) / max(1, len(policy.template_ids(text)))
            new_tokens = math.ceil(new_tokens * ratio)
        for prompt in longest:
            read = len(self.encode(SampledResponse(prompt.conversation, prompt.ids, [], "")).prompt)
            if not self.backbone.fits(*((read + new_tokens, after) if after else (read, new_tokens))):
                more = f" with {after} more" if after else ""
                raise UserError(
                    f"{name}: its context of {self.backbone.context_length} tokens is too short for a prompt of {read} and "
                    f"a response of {new_tokens}{more}; lower max_prompt_tokens or max_new_tokens"
                )
