"""The data model of training: conversations once they are token ids.

    records on disk (align.data.records)
        -> tokenization and limits (align.tokenization, align.batches.encoding)
        -> the records of this module
        -> micro-batches (align.batches) -> Padded tensors (align.core.tensor_ops) -> Backbone (align.models.backbone)

Everywhere, a *prompt* is all that is read before the assistant's turn and a *response* is that turn with the token that
ends it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

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
    """A prompt with all that is read after it, each by itself: a ranking's responses, or the rules of a judged response."""

    @property
    def prompt(self) -> TokenIds:
        """What is read once."""

    @property
    def responses(self) -> Sequence[TokenIds]:
        """What is read after it."""


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """One example of supervised fine-tuning.

    Attributes:
        loss_mask: for each response token whether it counts in the loss. In a conversation of several turns the response
            also holds the user's turns between, which do not.
    """

    prompt: TokenIds
    response: TokenIds
    loss_mask: list[bool]


class ExampleLengths(Sequence[int]):
    """Tokens of prompt and response of each example, counted when they are asked for.

    Args:
        examples: by their rows; what is read or written for an update may be put there later.
    """

    def __init__(self, examples: Sequence[EncodedDemonstration] | Mapping[int, EncodedDemonstration]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, row: int) -> int: ...
    @overload
    def __getitem__(self, row: slice) -> list[int]: ...

    def __getitem__(self, row: int | slice) -> int | list[int]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        example = self.examples[row]
        return len(example.prompt) + len(example.response)


@dataclass(frozen=True, slots=True)
class EncodedRanking:
    """One example of reward modeling: K responses to a prompt, as labelers ranked them.

    Attributes:
        ranks: [K]; 1 is best, equal ranks are ties.
        margin: by how much a better response ought to win; 0 asks for none.
        category: what the prompt is about, if the data says so.
        ratings: [K], the quality of each response, if labelers gave it.
        preferences: [K, K], the probability that response i is better than response j, if the data says so.
    """

    prompt: TokenIds
    responses: list[TokenIds]
    ranks: list[int]
    margin: float = 0.0
    category: str | None = None
    ratings: Sequence[int] | None = None
    preferences: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class EncodedJudgments:
    """One example of a rule model: a response with the rules that it was judged by.

    Attributes:
        prompt: the conversation and the response, which all rules share.
        responses: the rules [K].
        rules: their ids [K].
        targets: of each rule, the share of labelers who saw it violated among those who decided [K], 0 to 1.
    """

    prompt: TokenIds
    responses: list[TokenIds]
    rules: tuple[str, ...]
    targets: tuple[float, ...]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt to sample from, as a conversation and as token ids.

    Attributes:
        conversation: what reward functions and files get; of a prompt that was given as token ids, one turn with the text
            that they decode to.
        given_as_ids: the data holds the token ids, so nothing can be put before the prompt.
    """

    conversation: Conversation
    ids: TokenIds
    category: str | None = None
    id: str | None = None
    given_as_ids: bool = False


@dataclass(frozen=True)
class SampledResponse:
    """A response that a policy gave, as text and as the policy's token ids; what reward models score."""

    conversation: Conversation
    prompt_ids: TokenIds
    ids: TokenIds
    text: str
    ended: bool = True
    """False if it was cut off: it then gets no end token in the ids of another tokenizer."""
