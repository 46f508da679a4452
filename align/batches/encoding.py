"""Encoding of records as token ids within length limits."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from align.batches.limits import EncodedRow, Limits, OverlongCounts
from align.batches.mixtures import Data, Records, data_name, split_prefix
from align.core.errors import UserError, counted
from align.data.conversation import user_turn
from align.data.formats import convert_row, kind_name
from align.data.readers import read_records, report_single, scan_rows
from align.data.records import Conversation, Demonstration, Prompt, Ranking, Record
from align.data.sources import SourceRow
from align.models.loading import LoadedModel
from align.tokenization import ConversationError, Tokenization, encode_demonstration
from align.tokenization.encoded import EncodedDemonstration, EncodedPrompt, EncodedRanking, PromptResponse, opening_digest

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
Encoded = TypeVar("Encoded")


class UnknownTokenError(UserError):
    """A prompt has a token id that is not in the vocabulary."""


ApplyLimits = Callable[[list[int], list[int] | None], PromptResponse | None]
"""Applies the limits to a prompt and a response, see `_apply_limits`; None: the record is dropped."""


class SpelledTokens:
    """Counts records whose texts spell special tokens: usually a chat template was applied to them before."""

    def __init__(self, tokenization: Tokenization) -> None:
        self.tokenization = tokenization
        self.records = self.found = 0
        self.example = ""

    def add(self, record: Record) -> None:
        """Count a record."""
        is_read = getattr(record, "ids", None) is None
        turns = (*(record.prompt if is_read else ()), *getattr(record, "continuation", ()))
        token = self.tokenization.spelled_token([*(turn["content"] for turn in turns), *getattr(record, "responses", ())])
        self.records, self.found, self.example = self.records + 1, self.found + bool(token), self.example or token or ""

    def report(self, source: str, kind: str) -> None:
        """Warn if there was such a record, on the first process only."""
        if self.found and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%s: %d of %d %ss spell special tokens such as %r, which are read as plain characters; if a chat template "
                "wrote these texts, give their turns as role and content, or their token ids as input_ids",
                *(source, self.found, self.records, kind, self.example),
            )


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
        UserError: if a record exceeds the limits or the model's context, or if none is left.
    """
    source, _ = split_prefix(data)
    source = source if isinstance(source, str) else f"{kind_name(kind)}s in memory"
    encoded: list[Encoded] = []
    counts, spelled = OverlongCounts(limits), SpelledTokens(loaded.tokenization)
    for number, record in enumerate(records_of(data, kind, skip_bad_rows), start=1):
        spelled.add(record)
        row = _encode_record(record, f"{source}: record {record.id or number}", loaded, limits, encode_one)
        counts.add(row.over, len(row.items))
        encoded += row.items
    spelled.report(source, kind_name(kind))
    counts.report(source, kind_name(kind))
    if not encoded and kind is Ranking and counts.records and not counts.dropped:
        raise UserError(f"{source}: each of its {counts.records} rankings ties all responses; there is nothing to learn")
    if not encoded and not counts.records:
        raise UserError(f"{source}: has no {kind_name(kind)}; give at least one")
    if not encoded:
        raise UserError(f"{source}: no {kind_name(kind)} is left within the limits; raise them, or set overlong to truncate")
    return encoded


def _encode_record(
    record: R,
    where: str,
    loaded: LoadedModel,
    limits: Limits,
    encode_one: Callable[[R, ApplyLimits], Iterable[Encoded]],
) -> EncodedRow[Encoded]:
    over: set[str] = set()

    def apply_limits(prompt: list[int], response: list[int] | None) -> PromptResponse | None:
        over.update(limits.exceeded(prompt, response or ()))
        return _apply_limits(loaded, limits, where, record.prompt, prompt, response)

    try:
        return EncodedRow(list(encode_one(record, apply_limits)), tuple(sorted(over)))
    except (ConversationError, UnknownTokenError) as error:
        raise UserError(f"{where}: {error}") from error


def records_of(data: Data, kind: type[R], skip_bad_rows: bool) -> Iterator[R]:
    """Yield the records of a file, or those in memory.

    Raises:
        UserError: for a row that cannot be read; `skip_bad_rows` leaves such rows of a file out.
    """
    data, prefix = split_prefix(data)
    for record in _records_in(data, kind, skip_bad_rows):
        yield _with_prefix(record, prefix)


def _records_in(data: Records, kind: type[R], skip_bad_rows: bool) -> Iterator[R]:
    if isinstance(data, str | Path):
        yield from read_records(str(data), kind, skip_bad_rows=skip_bad_rows, token_ids=True)
        return
    source = f"{kind_name(kind)}s in memory"
    if isinstance(data, Mapping) or hasattr(data, "iterrows"):  # they iterate over names, which would become prompts
        remedy = "give a list of rows, or one split of a DatasetDict, such as data['train']"
        raise UserError(f"{source}: is a {type(data).__name__}, not a sequence of rows; {remedy}")
    rows = (SourceRow(f"{source}: item {number}", _row_of(item)) for number, item in enumerate(data, start=1))
    scanned = scan_rows(rows, kind, stop_at_bad=True)
    report_single(scanned, source)
    yield from scanned.records


def _row_of(item: Any) -> Any:
    """Return the row of an item in memory, which may be a prompt as text or as token ids."""
    if isinstance(item, str):
        return {"prompt": item}
    ids = item.tolist() if hasattr(item, "tolist") else item
    is_ids = isinstance(ids, list | tuple) and len(ids) > 0 and all(isinstance(token, int) for token in ids)
    return {"input_ids": ids} if is_ids else item


def _with_prefix(record: R, prefix: str) -> R:
    if not prefix:
        return record
    turns = list(record.prompt)
    if getattr(record, "ids", None) is not None:
        raise UserError("task_prefixes: a prefix cannot be put before prompts that are token ids (input_ids)")
    first = next(place for place, turn in enumerate(turns) if turn["role"] == "user")
    turns[first] = {"role": "user", "content": prefix + turns[first]["content"]}
    return replace(record, prompt=tuple(turns))  # type: ignore[type-var]  # every record is a dataclass


def encode_demonstrations(
    data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool
) -> list[EncodedDemonstration]:
    """Return the assistant's turns of demonstrations as examples; raises as `encode_records`."""
    encode_one = partial(_encode_demonstration, loaded)
    return encode_records(data, Demonstration, loaded, limits, skip_bad_rows, encode_one)


def encode_demonstration_row(
    loaded: LoadedModel, limits: Limits, row: SourceRow, prefix: str = ""
) -> EncodedRow[EncodedDemonstration]:
    """Return the examples of one row of a file, see `encode_demonstrations`; none if it is dropped.

    Raises:
        UserError: for a bad row, or one beyond the limits.
    """
    if row.error is not None:
        raise UserError(f"{row.where}: {row.error}")
    try:
        records = convert_row(row.row, Demonstration)[1]
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    _warn_of_stream(loaded.tokenization, row.where, [record for record in records if isinstance(record, Demonstration)])
    encode_one = partial(_encode_demonstration, loaded)
    demonstrations = (_with_prefix(record, prefix) for record in records if isinstance(record, Demonstration))
    found = [_encode_record(record, row.where, loaded, limits, encode_one) for record in demonstrations]
    over = sorted({setting for each in found for setting in each.over})
    return EncodedRow([example for each in found for example in each.items], tuple(over))


def _warn_of_stream(tokenization: Tokenization, where: str, records: Sequence[Demonstration]) -> None:
    """Warn of the first row of a stream that spells a special token: rows of a stream cannot be counted beforehand."""
    if tokenization.warned_of_spelled_tokens:
        return
    spelled = SpelledTokens(tokenization)
    for record in records:
        spelled.add(record)
    spelled.report(f"{where}, the first such row", "demonstration")
    tokenization.warned_of_spelled_tokens = spelled.found > 0


def _encode_demonstration(
    loaded: LoadedModel, record: Demonstration, apply_limits: ApplyLimits
) -> Iterator[EncodedDemonstration]:
    for example in encode_demonstration(loaded.tokenization, record, loaded.backbone.causal):
        kept = apply_limits(example.prompt, example.response)
        if kept is not None:
            mask = example.loss_mask[: len(kept.response)]
            yield EncodedDemonstration(*kept, mask, opening_digest(record.prompt))


def encode_rankings(
    data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool, whole_turns: bool = False
) -> list[EncodedRanking]:
    """Return rankings whose prompt and responses are all within the limits; raises as `encode_records`.

    A ranking that ties all responses is left out and counted.

    Args:
        whole_turns: responses include the text that the template writes after them, as other libraries' reward models read
            it.
    """
    tokenization = loaded.tokenization

    def encode_texts(record: Ranking) -> list[tuple[list[int], list[int]]]:
        if not whole_turns:
            prompt, responses = tokenization.answers_ids(record.prompt, record.responses)
            return [(prompt, response) for response in responses]
        pairs = [tokenization.whole_turn_ids(record.prompt, text) for text in record.responses]
        shared = min(len(prompt) for prompt, _ in pairs)  # a response's first token may join the prompt's last
        return [(prompt[:shared], [*prompt[shared:], *response]) for prompt, response in pairs]

    tied = 0

    def encode_one(record: Ranking, apply_limits: ApplyLimits) -> Iterator[EncodedRanking]:
        nonlocal tied
        if record.all_tied:
            tied += 1
            return
        fitted = [apply_limits(*pair) for pair in encode_texts(record)]
        kept = [pair for pair in fitted if pair is not None]
        if len(kept) == len(fitted):
            responses, opening = [pair.response for pair in kept], opening_digest(record.prompt)
            labels = (list(record.ranks), record.margin or 0.0, record.category, record.preferences, opening)
            yield EncodedRanking(kept[0].prompt, responses, *labels)

    encoded = encode_records(data, Ranking, loaded, limits, skip_bad_rows, encode_one)
    if tied and os.environ.get("RANK", "0") == "0":
        source = data_name(data)
        logger.warning(
            "%s: left out %s with all responses tied: ties add nothing to a loss", source, counted(tied, "ranking")
        )
    return encoded


def encode_prompts(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedPrompt]:
    """Return prompts to sample responses of up to `limits.response` tokens to; raises as `encode_records`."""

    def encode_one(record: Prompt, apply_limits: ApplyLimits) -> Iterator[EncodedPrompt]:
        encoded = encode_prompt(record, loaded, apply_limits)
        if encoded is not None:
            yield encoded

    return encode_records(data, Prompt, loaded, limits, skip_bad_rows, encode_one)


def encode_prompt(record: Prompt, loaded: LoadedModel, apply_limits: ApplyLimits) -> EncodedPrompt | None:
    """Return a prompt within the limits, or None if it is dropped. Token ids in the data are kept.

    Raises:
        UserError: for a token id that the tokenizer does not have.
    """
    if record.ids is None:
        kept = apply_limits(loaded.tokenization.prompt_ids(record.prompt), None)
        return None if kept is None else EncodedPrompt(record.prompt, kept.prompt, record.category, record.id)
    tokenizer = loaded.tokenization.tokenizer
    highest = max(record.ids)
    if highest >= len(tokenizer):
        wrong = f"has the id {highest}, but the model's tokenizer has {len(tokenizer)} tokens"
        raise UnknownTokenError(f"field 'input_ids': {wrong}; tokenize the prompts with the model's own tokenizer")
    kept = apply_limits(list(record.ids), None)
    if kept is None:
        return None
    text = tokenizer.decode(kept.prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    conversation = record.prompt or user_turn(str(text))
    return EncodedPrompt(conversation, kept.prompt, record.category, record.id, given_as_ids=True)


def encode_response(
    prompt: Conversation, response: str, loaded: LoadedModel, limits: Limits, where: str, counts: OverlongCounts
) -> PromptResponse | None:
    """Return a prompt and its response within the limits, or None if they are dropped.

    Args:
        where: names them in an error.
        counts: counts what exceeds the limits.

    Raises:
        UserError: if they exceed the limits, or spell a special token.
    """
    tokenization = loaded.tokenization
    try:
        ids = tokenization.answer_ids(prompt, response)
    except ConversationError as error:
        raise UserError(f"{where}: {error}") from error
    kept = limits.apply(*ids, where, _fixed_tokens(tokenization, limits, ids[0], prompt, where))
    counts.add(limits.exceeded(*ids), kept is not None)
    return kept


def _apply_limits(
    loaded: LoadedModel,
    limits: Limits,
    where: str,
    conversation: Conversation,
    prompt: list[int],
    response: list[int] | None,
) -> PromptResponse | None:
    """Apply the limits and the model's context size to a prompt and a response.

    Args:
        conversation: the record's prompt, with which `prompt` begins; empty if the record holds token ids.
        response: None leaves room for the longest one, which is still to be sampled.
    """
    fixed = _fixed_tokens(loaded.tokenization, limits, prompt, conversation, where)
    kept = limits.apply(prompt, response or [], where, fixed)
    if kept is not None:
        loaded.backbone.require_fit(len(kept.prompt), limits.response if response is None else len(kept.response), where)
    return kept


def _fixed_tokens(
    tokenization: Tokenization, limits: Limits, ids: list[int], prompt: Conversation, where: str
) -> tuple[int, int]:
    """Return the numbers of tokens at a prompt's beginning and a response's end that truncation keeps.

    Raises:
        UserError: if those of the prompt leave no room within its limit.
    """
    before = tokenization.fixed_before
    if prompt and limits.overlong == "truncate" and len(ids) > limits.prompt:
        before = max(before, tokenization.head_length(prompt))
        if before >= limits.prompt:
            raise UserError(
                f"{where}: the beginning of the prompt with its system turn has {before} tokens, which truncation keeps, "
                f"but the limit is {limits.prompt}; raise the limit, shorten the system turn, or set overlong to drop"
            )
    return before, tokenization.fixed_after
