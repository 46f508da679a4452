"""Records as token ids within the limits: what every stage makes of its data before it starts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from align.config import Overlong
from align.data.formats import kind_name
from align.data.readers import read_records
from align.data.records import Conversation, Demonstration, Prompt, Record
from align.errors import UserError
from align.models.backbone import Backbone
from align.models.loading import Loaded
from align.tokenization import SpellingError, Turn

R = TypeVar("R", bound=Record)
Encoded = TypeVar("Encoded")
Pair = tuple[list[int], list[int]]
Fit = Callable[[list[int], list[int] | None], Pair | None]
"""Holds a record's prompt and response to the limits, see `_fit`; None: the record is dropped."""


@dataclass(frozen=True)
class Limits:
    """How long a prompt and a response may be, in tokens, and what happens to longer ones.

    `overlong`: `error` refuses; `drop` leaves out; `truncate` keeps a prompt's end and a response's beginning.
    """

    prompt: int
    response: int
    overlong: Overlong = "error"

    def hold(self, prompt: list[int], response: list[int], where: str) -> Pair | None:
        """The prompt and the response within the limits; None where they are dropped.

        Args:
            where: names the record in an error.

        Raises:
            UserError: with `overlong` as `error`, if either is too long.
        """
        measured = (("prompt", len(prompt), self.prompt), ("response", len(response), self.response))
        too_long = [(name, length, limit) for name, length, limit in measured if length > limit]
        if too_long and self.overlong == "error":
            name, length, limit = too_long[0]
            raise UserError(
                f"{where}: the {name} has {length} tokens, max_{name}_tokens is {limit}; "
                "raise the limit, or set overlong to drop or truncate"
            )
        if too_long and self.overlong == "drop":
            return None
        return prompt[-self.prompt :], response[: self.response]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as it was read and as token ids."""

    conversation: Conversation
    ids: list[int]
    category: str | None = None
    id: str | None = None


def encode(
    source: str,
    kind: type[R],
    loaded: Loaded,
    limits: Limits,
    skip_bad_rows: bool,
    make: Callable[[R, Fit], Iterable[Encoded]],
) -> list[Encoded]:
    """Read records and turn them into token ids.

    Args:
        make: gives what a record becomes, of prompts and responses that went through the `Fit` it is handed.

    Raises:
        UserError: if a record is beyond the limits or beyond what the model can read, or if none is left.
    """
    found: list[Encoded] = []
    for number, record in enumerate(read_records(source, kind, skip_bad_rows=skip_bad_rows), start=1):
        where = f"{source}: record {record.id or number}"
        try:
            found += make(record, partial(_fit, loaded.backbone, limits, where))
        except SpellingError as error:
            raise UserError(f"{where}: {error}") from error
    if not found:
        raise UserError(f"{source}: no {kind_name(kind)} is left within the limits; raise them, or set overlong to truncate")
    return found


def encode_turns(source: str, loaded: Loaded, limits: Limits, skip_bad_rows: bool) -> list[Turn]:
    """The assistant's turns of demonstrations, as examples to learn from. Raises: see `encode`."""

    def make(record: Demonstration, fit: Fit) -> Iterable[Turn]:
        for turn in loaded.tokenization.turns(record, loaded.backbone.one_row_per_conversation):
            kept = fit(turn.prompt, turn.response)
            if kept is not None:
                yield Turn(*kept, turn.learn[: len(kept[1])])

    return encode(source, Demonstration, loaded, limits, skip_bad_rows, make)


def encode_prompts(source: str, loaded: Loaded, limits: Limits, skip_bad_rows: bool) -> list[EncodedPrompt]:
    """Prompts to sample responses of up to `limits.response` tokens to. Raises: see `encode`."""

    def make(record: Prompt, fit: Fit) -> Iterable[EncodedPrompt]:
        kept = fit(loaded.tokenization.prompt_ids(record.prompt), None)
        if kept is not None:
            yield EncodedPrompt(record.prompt, kept[0], record.category, record.id)

    return encode(source, Prompt, loaded, limits, skip_bad_rows, make)


def _fit(backbone: Backbone, limits: Limits, where: str, prompt: list[int], response: list[int] | None) -> Pair | None:
    """Hold a prompt and a response to the limits and to what the model can read.

    Args:
        response: None leaves room for the longest one, which is still to be sampled.
    """
    kept = limits.hold(prompt, response or [], where)
    if kept is not None:
        backbone.require_fit(len(kept[0]), limits.response if response is None else len(kept[1]), where)
    return kept
