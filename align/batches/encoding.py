"""Encoding of records as token ids within length limits, for all stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from align.data.formats import convert_row, kind_name
from align.data.readers import read_records
from align.data.records import Conversation, Demonstration, Prompt, Ranking, Record
from align.data.sources import SourceRow
from align.errors import UserError
from align.examples import EncodedDemonstration, EncodedPrompt, EncodedRanking, PromptResponse
from align.models.loading import LoadedModel
from align.settings import Overlong
from align.tokenization import SpecialTokenError, encode_demonstration

R = TypeVar("R", bound=Record)
Encoded = TypeVar("Encoded")
Records = str | Sequence[Record | Mapping[str, Any] | str]


@dataclass(frozen=True)
class Prefixed:
    """A source whose conversations get a text that names their task, as in T5 (Raffel et al. 2020, section 2.4).

    Attributes:
        prefix: put before the first user turn of each prompt.
    """

    source: Records | Path
    prefix: str


Data = Records | Path | Prefixed
"""Where records come from: a file, folder or hub name; or records in memory, as `align.data` records or as rows (dicts) in
any layout that the files may have. A string is taken as a prompt. Either may be `Prefixed`."""


ApplyLimits = Callable[[list[int], list[int] | None], PromptResponse | None]
"""Applies the limits to a prompt and a response, see `_apply_limits`; None: the record is dropped."""


@dataclass(frozen=True)
class Limits:
    """Maximum tokens of a prompt and of a response, and what happens to longer ones.

    Attributes:
        overlong: `error` refuses; `drop` leaves out; `truncate` keeps a prompt's end and a response's beginning.
    """

    prompt: int
    response: int
    overlong: Overlong = "error"

    def apply(
        self, prompt: list[int], response: list[int], where: str, fixed: tuple[int, int] = (0, 0)
    ) -> PromptResponse | None:
        """The prompt and the response within the limits; None if they are dropped.

        Args:
            where: names the record in an error.
            fixed: numbers of tokens at the prompt's beginning and the response's end that truncation keeps.

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
        before, after = fixed
        if len(prompt) > self.prompt:
            prompt = [*prompt[:before], *prompt[len(prompt) - max(self.prompt - before, 0) :]]
        if len(response) > self.response:
            response = [*response[: max(self.response - after, 0)], *response[len(response) - after :]]
        return PromptResponse(prompt, response)


def encode_records(
    data: Data,
    kind: type[R],
    loaded: LoadedModel,
    limits: Limits,
    skip_bad_rows: bool,
    encode_one: Callable[[R, ApplyLimits], Iterable[Encoded]],
) -> list[Encoded]:
    """Read records and turn them into token ids.

    Args:
        skip_bad_rows: leave out rows of a file that cannot be read, and list them.
        encode_one: yields a record's examples; it passes prompts and responses through the `ApplyLimits` it is given.

    Raises:
        UserError: if a record exceeds the limits or what the model can read, or if none is left.
    """
    source, _ = split_prefix(data)
    source = source if isinstance(source, str) else f"{kind_name(kind)}s in memory"
    encoded: list[Encoded] = []
    for number, record in enumerate(records_of(data, kind, skip_bad_rows), start=1):
        encoded += _encode_record(record, f"{source}: record {record.id or number}", loaded, limits, encode_one)
    if not encoded:
        raise UserError(f"{source}: no {kind_name(kind)} is left within the limits; raise them, or set overlong to truncate")
    return encoded


def _encode_record(
    record: R,
    where: str,
    loaded: LoadedModel,
    limits: Limits,
    encode_one: Callable[[R, ApplyLimits], Iterable[Encoded]],
) -> list[Encoded]:
    try:
        return list(encode_one(record, partial(_apply_limits, loaded, limits, where)))
    except SpecialTokenError as error:
        raise UserError(f"{where}: {error}") from error


def records_of(data: Data, kind: type[R], skip_bad_rows: bool) -> Iterator[R]:
    """The records of a file, or those in memory.

    Raises:
        UserError: for a row that cannot be read; of a file, `skip_bad_rows` leaves such rows out.
    """
    data, prefix = split_prefix(data)
    for record in _records_in(data, kind, skip_bad_rows):
        yield _with_prefix(record, prefix)


def _records_in(data: Records, kind: type[R], skip_bad_rows: bool) -> Iterator[R]:
    if isinstance(data, str):
        yield from read_records(data, kind, skip_bad_rows=skip_bad_rows)
        return
    source = f"{kind_name(kind)}s in memory"
    for number, row in enumerate(data, start=1):
        if isinstance(row, kind):
            yield row
            continue
        try:
            converted = convert_row({"prompt": row} if isinstance(row, str) else row, kind)[1]
        except UserError as error:
            raise UserError(f"{source}: item {number}: {error}") from error
        yield from (record for record in converted if isinstance(record, kind))


def split_prefix(data: Data) -> tuple[Records, str]:
    """A source, a path as text, and its prefix, "" if it has none."""
    source, prefix = (data.source, data.prefix) if isinstance(data, Prefixed) else (data, "")
    return (str(source) if isinstance(source, Path) else source), prefix


def _with_prefix(record: R, prefix: str) -> R:
    if not prefix:
        return record
    turns = list(record.prompt)
    first = next(place for place, turn in enumerate(turns) if turn["role"] == "user")
    turns[first] = {"role": "user", "content": prefix + turns[first]["content"]}
    return replace(record, prompt=tuple(turns))  # type: ignore[type-var]  # every record is a dataclass


def encode_demonstrations(
    data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool
) -> list[EncodedDemonstration]:
    """The assistant's turns of demonstrations, as examples to learn from. Raises: see `encode_records`."""
    encode_one = partial(_encode_demonstration, loaded)
    return encode_records(data, Demonstration, loaded, limits, skip_bad_rows, encode_one)


def encode_demonstration_row(
    loaded: LoadedModel, limits: Limits, row: SourceRow, prefix: str = ""
) -> list[EncodedDemonstration]:
    """The examples of one row of a file, see `encode_demonstrations`; none if it is dropped.

    Args:
        prefix: see `Prefixed`.

    Raises:
        UserError: for a bad row, or one beyond the limits.
    """
    if row.error is not None:
        raise UserError(f"{row.where}: {row.error}")
    try:
        records = convert_row(row.row, Demonstration)[1]
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    encode_one = partial(_encode_demonstration, loaded)
    demonstrations = (_with_prefix(record, prefix) for record in records if isinstance(record, Demonstration))
    found = [_encode_record(record, row.where, loaded, limits, encode_one) for record in demonstrations]
    return [example for examples in found for example in examples]


def _encode_demonstration(
    loaded: LoadedModel, record: Demonstration, apply_limits: ApplyLimits
) -> Iterator[EncodedDemonstration]:
    for example in encode_demonstration(loaded.tokenization, record, loaded.backbone.causal):
        kept = apply_limits(example.prompt, example.response)
        if kept is not None:
            yield EncodedDemonstration(*kept, example.loss_mask[: len(kept.response)])


def encode_rankings(
    data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool, whole_turns: bool = False
) -> list[EncodedRanking]:
    """Rankings whose prompt and responses are all within the limits.

    Args:
        whole_turns: with responses to the end of what the template writes after them, as other libraries' reward models
            read them.

    Raises:
        UserError: see `encode_records`.
    """
    tokenization = loaded.tokenization

    def encode_texts(record: Ranking) -> list[tuple[list[int], list[int]]]:
        if not whole_turns:
            prompt = tokenization.prompt_ids(record.prompt)
            return [(prompt, tokenization.response_ids(text)) for text in record.responses]
        pairs = [tokenization.whole_turn_ids(record.prompt, text) for text in record.responses]
        shared = min(len(prompt) for prompt, _ in pairs)  # a response's first token may join the prompt's last
        return [(prompt[:shared], [*prompt[shared:], *response]) for prompt, response in pairs]

    def encode_one(record: Ranking, apply_limits: ApplyLimits) -> Iterator[EncodedRanking]:
        fitted = [apply_limits(*pair) for pair in encode_texts(record)]
        kept = [pair for pair in fitted if pair is not None]
        if len(kept) == len(fitted):
            responses = [pair.response for pair in kept]
            labels = (list(record.ranks), record.margin or 0.0, record.category, record.ratings, record.preferences)
            yield EncodedRanking(kept[0].prompt, responses, *labels)

    return encode_records(data, Ranking, loaded, limits, skip_bad_rows, encode_one)


def encode_prompts(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedPrompt]:
    """Prompts to sample responses of up to `limits.response` tokens to. Raises: see `encode_records`."""

    def encode_one(record: Prompt, apply_limits: ApplyLimits) -> Iterator[EncodedPrompt]:
        kept = apply_limits(loaded.tokenization.prompt_ids(record.prompt), None)
        if kept is not None:
            yield EncodedPrompt(record.prompt, kept.prompt, record.category, record.id)

    return encode_records(data, Prompt, loaded, limits, skip_bad_rows, encode_one)


def encode_response(
    prompt: Conversation, response: str, loaded: LoadedModel, limits: Limits, where: str
) -> PromptResponse | None:
    """A prompt and its response within the limits; None if they are dropped.

    Args:
        where: names them in an error.

    Raises:
        UserError: if they exceed the limits, or spell a special token.
    """
    tokenization = loaded.tokenization
    try:
        ids = tokenization.prompt_ids(prompt), tokenization.response_ids(response)
    except SpecialTokenError as error:
        raise UserError(f"{where}: {error}") from error
    return limits.apply(*ids, where, (tokenization.fixed_before, tokenization.fixed_after))


def _apply_limits(
    loaded: LoadedModel, limits: Limits, where: str, prompt: list[int], response: list[int] | None
) -> PromptResponse | None:
    """Apply the limits, and the model's context size, to a prompt and a response.

    Args:
        response: None leaves room for the longest one, which is still to be sampled.
    """
    fixed = (loaded.tokenization.fixed_before, loaded.tokenization.fixed_after)
    kept = limits.apply(prompt, response or [], where, fixed)
    if kept is not None:
        loaded.backbone.require_fit(len(kept.prompt), limits.response if response is None else len(kept.response), where)
    return kept
