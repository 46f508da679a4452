"""Records as token ids: the data model of training.

    records on disk (align.data.records)
        -> tokenization and limits (align.tokenization, align.batches.encoding)
        -> the records of this module
        -> micro-batches (align.batches) -> Padded tensors (align.core.tensor_ops) -> Backbone (align.models.backbone)

A *prompt* is everything before the assistant's turn. A *response* is that turn with its end token.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from align.data.records import Conversation

TokenIds = list[int]


class PromptResponse(NamedTuple):
    """A prompt and one response."""

    prompt: TokenIds
    response: TokenIds


class PromptResponses(NamedTuple):
    """A prompt and several responses to it."""

    prompt: TokenIds
    responses: list[TokenIds]


class SharedPrompt(Protocol):
    """A prompt with alternative continuations, such as the responses of a ranking or the rules for a judged response."""

    @property
    def prompt(self) -> TokenIds:
        """Prompt, which is encoded once."""

    @property
    def responses(self) -> Sequence[TokenIds]:
        """Alternative continuations."""


def opening_digest(conversation: Conversation) -> int:
    """Return 64 bits of the SHA-256 of the first user turn, ignoring whitespace."""
    text = next((turn["content"] for turn in conversation if turn["role"] == "user"), "")
    return int.from_bytes(hashlib.sha256(" ".join(text.split()).encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """An SFT example.

    Attributes:
        loss_mask: whether each response token is included in the loss. If a conversation has several turns, the response
            also contains the user's turns, which are not included.
        opening: digest of the conversation's first user turn, used to split off validation data.
    """

    prompt: TokenIds
    response: TokenIds
    loss_mask: list[bool]
    opening: int = 0


@dataclass(frozen=True, slots=True)
class EncodedRanking:
    """A reward modeling example: K ranked responses to a prompt.

    Attributes:
        ranks: [K] ranks. 1 is best, and equal ranks are ties.
        margin: reward difference by which a better response should win.
        preferences: [K, K] probability that response i is better than response j.
        opening: digest of the conversation's first user turn, as in `EncodedDemonstration`.
        ended: [K] whether each response is complete. For others, the end token was added only for scoring. Default: all.
    """

    prompt: TokenIds
    responses: list[TokenIds]
    ranks: list[int]
    margin: float = 0.0
    category: str | None = None
    preferences: Sequence[Sequence[float]] | None = None
    opening: int = 0
    ended: Sequence[bool] | None = None

    @property
    def written_tokens(self) -> list[int]:
        """Return the number of tokens [K] of each response, excluding an added end token."""
        ended = self.ended or [True] * len(self.responses)
        return [len(ids) - (not is_ended) for ids, is_ended in zip(self.responses, ended, strict=True)]


@dataclass(frozen=True, slots=True)
class EncodedJudgments:
    """A rule model example: a response and the rules by which it was judged.

    Attributes:
        prompt: conversation and response, shared by all rules.
        responses: [K] encoded rules.
        rules: [K] rule ids.
        targets: [K] fraction of decided labelers according to whom the response violates the rule.
    """

    prompt: TokenIds
    responses: list[TokenIds]
    rules: tuple[str, ...]
    targets: tuple[float, ...]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt to sample from, as conversation and token ids.

    Attributes:
        conversation: input of reward functions. For a prompt given as token ids, one turn with the decoded text.
        given_as_ids: whether the prompt was given as token ids, so that no text can be prepended.
        columns: other columns of the row, for reward functions.
    """

    conversation: Conversation
    ids: TokenIds
    category: str | None = None
    id: str | None = None
    given_as_ids: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def opening(self) -> int:
        """Digest of the first user turn, used to split off validation data."""
        return opening_digest(self.conversation)


@dataclass(frozen=True)
class SampledResponse:
    """A sampled response as text and as the policy's token ids."""

    conversation: Conversation
    prompt_ids: TokenIds
    ids: TokenIds
    text: str
    ended: bool = True
    """False if truncated. No end token is then added when re-tokenizing."""
    given_as_ids: bool = False
    """Whether the prompt was given as token ids, without a chat template."""
