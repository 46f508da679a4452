"""Scoring responses of any policy with a reward model that may have another tokenizer."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from align.batches.micro_batches import MicroBatch, group_tokens, map_groups, pack_groups, prompt_groups
from align.core.errors import UserError, counted
from align.data.records import Conversation
from align.models.backbone import Backbone, flops_profile
from align.models.vocabulary import vocabulary_rows
from align.reward.checkpoint import LoadedReward
from align.reward.rankings import RewardFunctionOfTokens
from align.runtime.distributed import print_once
from align.runtime.flops import FlopsProfile
from align.runtime.sharding import place_frozen_model
from align.tokenization import ConversationError, PairTokenization, Tokenization
from align.tokenization.encoded import EncodedPrompt, PromptResponse, SampledResponse
from align.tokenization.rendering import ChatRenderer

PROMPTS_TRIED = 16
"""Number of longest prompts, by the policy's tokens, to check in the reward model's tokens."""


def reads_ids_of(reward: LoadedReward, policy: Tokenization) -> bool:
    """Return whether a reward model can use a policy's token ids unchanged.

    Prompts and turns must be formatted in the same way. A classifier without a chat template accepts the ids of any policy
    with its vocabulary.
    """
    own = reward.loaded.tokenization
    if reward.reads_policy_ids:
        return True
    if reward.has_template or isinstance(own, PairTokenization):
        return own.reads_alike(policy)
    return knows_tokens_of(own, policy)


def knows_tokens_of(own: Tokenization, policy: Tokenization) -> bool:
    """Return whether two tokenizers have the same tokens with the same ids.

    Tokens that are only padding, such as one added to the policy's tokenizer, are ignored.
    """
    if isinstance(own, PairTokenization) or isinstance(policy, PairTokenization):
        return False
    first, second = own.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    if first == second:
        return True
    changed = {token for token, _ in first.items() ^ second.items()}

    def only_pad(tokenization: Tokenization, vocabulary: Mapping[str, int]) -> bool:
        ids = {vocabulary[token] for token in changed & vocabulary.keys()}
        return ids <= tokenization.chat.special_ids and ids.isdisjoint(tokenization.written_ids())

    return only_pad(own, first) and only_pad(policy, second)


def separate_special_tokens(chat: ChatRenderer, text: str) -> str:
    """Insert spaces into special tokens that a text spells out, so that they are tokenized in pieces."""
    while (token := chat.spelled_token([text])) is not None:
        text = text.replace(token, " ".join(token) if len(token) > 1 else " ")
    return text


def hidden_token(chat: ChatRenderer, text: str) -> str | None:
    """Return a special token that a text spells only after the tokenizer replaces letters, such as full-width ones."""
    normalizer = getattr(getattr(chat.tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or text.isascii():
        return None
    return chat.spelled_token([normalizer.normalize_str(separate_special_tokens(chat, text))])


def normalize_and_separate(chat: ChatRenderer, text: str) -> str:
    """Apply `separate_special_tokens` for a tokenizer that first replaces letters, such as full-width ones."""
    return separate_special_tokens(chat, unicodedata.normalize("NFKC", text))


def without_punctuation(_: ChatRenderer, text: str) -> str:
    """Return the words of a text."""
    return re.sub(r"[^\w\s]|_", " ", text)


REWRITINGS = (separate_special_tokens, normalize_and_separate, without_punctuation)
"""Ways to rewrite a text that the reward model's tokenizer cannot read, the mildest first.

A policy may sample any text, so no text may stop a run.
"""


@dataclass(eq=False)
class RewardModelScorer:
    """A frozen reward model that scores responses of a policy.

    Attributes:
        mean: subtracted from every reward.
        budget: maximum padded tokens per forward pass.
        tokenization: the reward model's tokenization, if it differs from the policy's. Text is then tokenized again.
        reads_whole_turns: see `LoadedReward`; needs `tokenization`.
        reads_given_ids: whether to use prompts given as token ids unchanged, with the response's ids.
        rewritten: text that had to be changed for the model's tokenizer.
        end_id: end token appended to truncated responses, because the score is read there. None to append nothing.
    """

    module: RewardFunctionOfTokens
    mean: float
    backbone: Backbone
    accelerator: Accelerator
    budget: int
    flops_profile: FlopsProfile
    tokenization: Tokenization | None = None
    reads_whole_turns: bool = False
    reads_given_ids: bool = False
    rewritten: int = 0
    end_id: int | None = None

    @classmethod
    def from_loaded(
        cls, reward: LoadedReward, policy: Tokenization | None, accelerator: Accelerator, budget: int
    ) -> "RewardModelScorer":
        """Make the scorer of a loaded reward model, for responses of a policy with the tokenization `policy`.

        If None, responses are text of unknown origin, which the scorer tokenizes.
        """
        loaded = reward.loaded
        profile = flops_profile(loaded.backbone, loaded.adapter)
        module = place_frozen_model(reward.model, accelerator)
        alike = policy is not None and reads_ids_of(reward, policy) and not reward.reads_whole_turns
        own = None if alike else loaded.tokenization
        known = policy is not None and knows_tokens_of(loaded.tokenization, policy)
        return cls(
            module=module,
            mean=reward.mean,
            backbone=loaded.backbone,
            accelerator=accelerator,
            budget=budget,
            flops_profile=profile,
            tokenization=own,
            reads_whole_turns=reward.reads_whole_turns,
            reads_given_ids=known,
            end_id=(policy or loaded.tokenization).end_id if reward.scores_at_end else None,
        )

    def __call__(self, responses: Sequence[SampledResponse]) -> list[float]:
        """Return rewards minus the mean over demonstrations, the same on every process. For errors, see `score_rows`."""
        return self.score_rows([self.encode(response) for response in responses])

    @torch.no_grad()
    def score_rows(self, rows: Sequence[PromptResponse]) -> list[float]:
        """Score prompts and responses in the model's token ids. Rows of one prompt are processed together.

        Raises:
            UserError: if a row exceeds the reward model's context length.
        """
        for row in rows:
            if not self.backbone.fits(len(row.prompt), len(row.response)):
                raise UserError(
                    f"the reward model cannot read {len(row.prompt)} prompt and {len(row.response)} response tokens; "
                    "lower max_prompt_tokens or max_new_tokens"
                )
        prompt_ids, response_ids = [row.prompt for row in rows], [row.response for row in rows]
        device = self.accelerator.device

        def score_batch(batch: MicroBatch) -> list[float]:
            inputs = pack_groups(prompt_ids, response_ids, batch.groups, device)
            rewards = self.module(inputs.prompt, inputs.response, inputs.prompt_of_response) - self.mean
            scores: list[float] = rewards.tolist()
            return scores

        groups = prompt_groups(self.backbone, prompt_ids, response_ids, range(len(rows)), self.budget)
        sizes = group_tokens(self.backbone, prompt_ids, response_ids, groups)
        return map_groups(groups, sizes, self.budget, self.accelerator, score_batch)

    def encode(self, response: SampledResponse) -> PromptResponse:
        """Return a prompt and a response in the token ids of the reward model."""
        ended = response.ended or self.end_id is not None
        if self.tokenization is None or (self.reads_given_ids and response.given_as_ids):
            rows = vocabulary_rows(self.backbone.model)
            # The policy may sample a padding token, or an id without a token, for which the model has no row.
            prompt, written = ([id for id in ids if id < rows] for ids in (response.prompt_ids, response.ids))
            return PromptResponse(prompt, written if response.ended else self._with_end(prompt, written))
        try:
            return self._encode_text(self.tokenization, response.conversation, response.text, ended)
        except ConversationError as error:
            for rewrite in REWRITINGS:
                chat = self.tokenization.chat
                turns: Conversation = tuple(
                    {"role": turn["role"], "content": rewrite(chat, turn["content"])} for turn in response.conversation
                )
                with suppress(ConversationError):
                    ids = self._encode_text(self.tokenization, turns, rewrite(chat, response.text), ended)
                    self._report_rewritten(error)
                    return ids
            raise

    def _encode_text(self, tokenization: Tokenization, conversation: Conversation, text: str, ended: bool) -> PromptResponse:
        for each in (text, *(turn["content"] for turn in conversation)):
            if token := hidden_token(tokenization.chat, each):
                raise ConversationError(f"the text contains {token!r} in other letters, which the tokenizer replaces")
        if self.reads_whole_turns:
            return PromptResponse(*tokenization.whole_turn_ids(conversation, text, ended))
        return PromptResponse(*tokenization.answer_ids(conversation, text, whole=False, ended=ended))

    def _report_rewritten(self, error: ConversationError) -> None:
        self.rewritten += 1
        if self.rewritten & (self.rewritten - 1) == 0:  # 1, 2, 4, 8 and so on
            print_once(f"{counted(self.rewritten, 'text')} rewritten for the reward model's tokenizer: {error}")

    def _with_end(self, prompt: list[int], ids: list[int]) -> list[int]:
        """Return response ids with an end token, which replaces the last id if the context has no room for one more."""
        if self.end_id is None:
            return ids
        has_room = self.backbone.fits(len(prompt), len(ids) + 1)
        return [*(ids if has_room else ids[:-1]), self.end_id]

    def require_context(
        self, name: str, prompts: Sequence[EncodedPrompt], new_tokens: int, policy: Tokenization, after: int = 0
    ) -> None:
        """Raise a UserError if the context is too short for the longest prompts with the longest responses.

        Args:
            name: name of the model in error messages.
            new_tokens: maximum response length, in the policy's tokens. The count of another tokenizer is estimated from
                the prompts.
            after: number of tokens after a response, such as a rule.
        """
        longest = sorted(prompts, key=lambda prompt: len(prompt.ids))[-PROMPTS_TRIED:]
        if self.tokenization is not None:
            text = "\n".join(message["content"] for prompt in longest for message in prompt.conversation)
            ratio = len(self.tokenization.chat.template_ids(text)) / max(1, len(policy.chat.template_ids(text)))
            new_tokens = math.ceil(new_tokens * ratio)
        for prompt in longest:
            nothing = SampledResponse(prompt.conversation, prompt.ids, [], "", given_as_ids=prompt.given_as_ids)
            read = len(self.encode(nothing).prompt)
            if not self.backbone.fits(*((read + new_tokens, after) if after else (read, new_tokens))):
                more = f" with {after} more" if after else ""
                raise UserError(
                    f"{name}: its context of {self.backbone.context_length} tokens is too short for a prompt of {read} and "
                    f"a response of {new_tokens}{more}; lower max_prompt_tokens or max_new_tokens"
                )
