"""Encoding of records as token ids within length limits, and counts of the records that exceed them."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from align.batches.mixtures import Data, data_name, split_prefix
from align.core.errors import UserError, counted
from align.core.settings import Overlong
from align.data.conversation import user_turn
from align.data.formats import kind_name
from align.data.readers import read_records, report_single, scan_rows
from align.data.records import Conversation, Demonstration, Prompt, Ranking, Record
from align.data.sources import SourceRow
from align.models.loading import LoadedModel
from align.tokenization import ConversationError, Tokenization, encode_demonstration
from align.tokenization.encoded import EncodedDemonstration, EncodedPrompt, EncodedRanking, PromptResponse, opening_digest

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
Example = TypeVar("Example")
ApplyLimits = Callable[[list[int], list[int] | None], PromptResponse | None]
"""Applies the limits to a prompt and a response, see `_within_limits`; None: the record is dropped."""
MIN_KEPT = 0.1
"""Smallest share of the records that `overlong: drop` may keep. With less, the limits rather than the data are wrong."""


@dataclass(frozen=True)
class Limits:
    """Maximum tokens of a prompt and of a response, and the treatment of longer ones.

    Attributes:
        overlong: `error` refuses; `drop` leaves out; `truncate` keeps a prompt's end with its start token and system turn,
            and a response's beginning.
        settings: the settings that hold the two limits, for messages.
    """

    prompt: int
    response: int
    overlong: Overlong = "error"
    settings: tuple[str, str] = ("max_prompt_tokens", "max_response_tokens")

    def exceeded(self, prompt: Sequence[int], response: Sequence[int]) -> list[str]:
        """Return the settings of the limits that a prompt and a response exceed."""
        lengths = zip((len(prompt), len(response)), (self.prompt, self.response), self.settings, strict=True)
        return [setting for length, limit, setting in lengths if length > limit]

    def apply(
        self, prompt: list[int], response: list[int], where: str, fixed: tuple[int, int] = (0, 0)
    ) -> PromptResponse | None:
        """Return the prompt and the response within the limits, or None if they are dropped.

        Args:
            fixed: numbers of tokens at the prompt's beginning and the response's end that truncation keeps.
        """
        too_long = self.exceeded(prompt, response)
        if too_long and self.overlong == "error":
            is_prompt = len(prompt) > self.prompt
            what = f"prompt has {len(prompt)}" if is_prompt else f"response has {len(response)}"
            limit = f"{too_long[0]} is {self.prompt if is_prompt else self.response}"
            raise UserError(f"{where}: the {what} tokens, {limit}; raise the limit, or set overlong to drop or truncate")
        if too_long and self.overlong == "drop":
            return None
        before, after = fixed
        if len(prompt) > self.prompt:
            prompt = [*prompt[:before], *prompt[len(prompt) - max(self.prompt - before, 0) :]]
        if len(response) > self.response:
            response = [*response[: max(self.response - after, 0)], *response[len(response) - after :]]
        return PromptResponse(prompt, response)


class OverlongCounts:
    """Counts records by the limits that they exceed: all, those of which nothing is left, those that were shortened."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.records = self.dropped = self.cut = 0
        self.over: Counter[str] = Counter()

    def add(self, over: Collection[str], kept: int) -> None:
        """Count a record that exceeds the limits of the settings `over`, and of which `kept` examples are left."""
        self.records += 1
        self.over.update(over)
        self.dropped += bool(over and not kept)
        self.cut += bool(over and kept)

    def report(self, source: str, kind: str) -> None:
        """Log on the first process how many records were dropped or truncated; `kind` names a record, in the singular."""
        left = self.records - self.dropped
        if self.dropped and not left:
            wrong = f"no {kind} is left within the limits; raise them, or set overlong to truncate"
            raise UserError(f"{source}: {wrong} ({self._over_which()} of {self.records})")
        if self.dropped and left < MIN_KEPT * self.records:
            wrong = f"overlong drop leaves {left} of {self.records} {kind}s ({self._over_which()}), less than {MIN_KEPT:.0%}"
            raise UserError(f"{source}: {wrong}; raise the limit, set overlong to truncate, or remove the long rows")
        if not self.over or os.environ.get("RANK", "0") != "0":
            return
        overlong = self.limits.overlong
        done = f"{'shortened' if overlong == 'truncate' else 'dropped turns of'} {self.cut} of {self.records} {kind}s"
        if self.dropped:
            turns = f", and turns of {self.cut} more" if self.cut else ""
            done = f"left out {self.dropped} of {self.records} {kind}s{turns}"
        logger.warning("%s: overlong %s %s (%s)", source, overlong, done, self._over_which())

    def _over_which(self) -> str:
        values = dict(zip(self.limits.settings, (self.limits.prompt, self.limits.response), strict=True))
        return ", ".join(f"{count} over {setting} {values[setting]}" for setting, count in self.over.items())


def encode_records(
    data: Data,
    kind: type[R],
    loaded: LoadedModel,
    limits: Limits,
    skip_bad_rows: bool,
    encode_one: Callable[[R, ApplyLimits], Iterable[Example]],
) -> list[Example]:
    """Read records and turn them into token ids.

    Args:
        encode_one: yields a record's examples; it passes prompts and responses through the `ApplyLimits` it is given.

    Raises:
        UserError: if a record exceeds the limits or the model's context, or if none is left.
    """
    source, name = split_prefix(data)[0], kind_name(kind)
    source = source if isinstance(source, str) else f"{name}s in memory"
    encoded: list[Example] = []
    spelled: list[str] = []
    unknown: list[str] = []  # the records with unknown characters
    twice, doubled = 2 * tuple(loaded.tokenization.chat.opening_ids), 0
    counts = OverlongCounts(limits)
    for number, record in enumerate(records_of(data, kind, skip_bad_rows), start=1):
        spelled += filter(None, [_spelled_token(record, loaded.tokenization)])
        doubled += bool(twice) and (getattr(record, "ids", None) or ())[: len(twice)] == twice
        where = f"{source}: record {record.id or number}"
        examples, over = _encode_record(record, where, loaded, limits, encode_one, unknown)
        counts.add(over, len(examples))
        encoded += examples
    if spelled and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: %d of %d %ss spell special tokens such as %r, which are read as plain characters; if a chat template "
            "wrote these texts, give their turns as role and content, or their token ids as input_ids",
            *(source, len(spelled), counts.records, name, spelled[0]),
        )
    if doubled and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: %d of %d %ss begin with the start token twice; tokenize the text of a chat template with "
            "add_special_tokens=False",
            *(source, doubled, counts.records, name),
        )
    if unknown and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: %d of %d %ss have characters that the tokenizer does not know and reads as %r (first: %s)",
            *(source, len(set(unknown)), counts.records, name, loaded.tokenization.tokenizer.unk_token),
            unknown[0].removeprefix(f"{source}: "),
        )
    counts.report(source, name)
    if encoded:
        return encoded
    if kind is Ranking and counts.records and not counts.dropped:
        raise UserError(f"{source}: each of its {counts.records} rankings ties all responses; there is nothing to learn")
    if not counts.records:
        raise UserError(f"{source}: has no {name}; give at least one")
    raise UserError(f"{source}: no {name} is left within the limits; raise them, or set overlong to truncate")


def _spelled_token(record: Record, tokenization: Tokenization) -> str | None:
    """Return a special token that a record's texts spell: usually a chat template was applied to them before."""
    prompt = record.prompt if getattr(record, "ids", None) is None else ()
    texts = [turn["content"] for turn in (*prompt, *getattr(record, "continuation", ()))]
    return tokenization.chat.spelled_token([*texts, *getattr(record, "responses", ())])


def _encode_record(
    record: R,
    where: str,
    loaded: LoadedModel,
    limits: Limits,
    encode_one: Callable[[R, ApplyLimits], Iterable[Example]],
    unknown: list[str],
) -> tuple[list[Example], set[str]]:
    """Return a record's examples, and the settings of the limits that it exceeds.

    Args:
        unknown: receives `where` if the tokenizer does not know a character of the record.
    """
    over: set[str] = set()

    def apply_limits(prompt: list[int], response: list[int] | None) -> PromptResponse | None:
        if loaded.tokenization.chat.unknown_id in (*prompt, *(response or ())):
            unknown.append(where)
        over.update(limits.exceeded(prompt, response or ()))
        kept = _within_limits(loaded.tokenization, limits, where, record.prompt, prompt, response or [])
        if kept is not None:  # a response that is still to be sampled needs room for the longest one
            longest = limits.response if response is None else len(kept.response)
            loaded.backbone.require_fit(len(kept.prompt), longest, where)
        return kept

    try:
        return list(encode_one(record, apply_limits)), over
    except ConversationError as error:
        raise UserError(f"{where}: {error}") from error


def _within_limits(
    tokenization: Tokenization, limits: Limits, where: str, turns: Conversation, prompt: list[int], response: list[int]
) -> PromptResponse | None:
    """Apply the limits to a prompt and a response. Truncation keeps a prompt's beginning with its system turn.

    Args:
        turns: those that `prompt` begins with; empty if the record holds token ids.
    """
    before = tokenization.fixed_before
    if turns and limits.overlong == "truncate" and len(prompt) > limits.prompt:
        before = max(before, tokenization.head_length(turns))
        if before >= limits.prompt:
            raise UserError(
                f"{where}: the beginning of the prompt with its system turn has {before} tokens, which truncation keeps, "
                f"but the limit is {limits.prompt}; raise the limit, shorten the system turn, or set overlong to drop"
            )
    return limits.apply(prompt, response, where, (before, tokenization.fixed_after))


def records_of(data: Data, kind: type[R], skip_bad_rows: bool) -> Iterator[R]:
    """Yield the records of a file, or those in memory."""
    records, prefix = split_prefix(data)
    if isinstance(records, str):
        found: Iterable[R] = read_records(records, kind, skip_bad_rows=skip_bad_rows, token_ids=True)
    else:
        found = _records_in_memory(records, kind)
    for record in found:
        yield _with_prefix(record, prefix) if prefix else record


def _records_in_memory(data: Any, kind: type[R]) -> Sequence[R]:
    source = f"{kind_name(kind)}s in memory"
    if isinstance(data, Mapping) or hasattr(data, "iterrows"):  # they iterate over names, which would become prompts
        remedy = "give a list of rows, or one split of a DatasetDict, such as data['train']"
        raise UserError(f"{source}: is a {type(data).__name__}, not a sequence of rows; {remedy}")
    rows = (SourceRow(f"{source}: item {number}", _row_of(item)) for number, item in enumerate(data, start=1))
    scanned = scan_rows(rows, kind, stop_at_bad=True)
    report_single(scanned, source)
    return scanned.records


def _row_of(item: Any) -> Any:
    """Return the row of an item in memory, which may be a prompt as text or as token ids."""
    if isinstance(item, str):
        return {"prompt": item}
    ids = item.tolist() if hasattr(item, "tolist") else item
    is_ids = isinstance(ids, list | tuple) and len(ids) > 0 and all(isinstance(token, int) for token in ids)
    return {"input_ids": ids} if is_ids else item


def _with_prefix(record: R, prefix: str) -> R:
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

    def encode_one(record: Demonstration, apply_limits: ApplyLimits) -> Iterator[EncodedDemonstration]:
        for example in encode_demonstration(loaded.tokenization, record, loaded.backbone.causal):
            kept = apply_limits(example.prompt, example.response)
            if kept is not None:
                mask = example.loss_mask[: len(kept.response)]
                yield EncodedDemonstration(*kept, mask, opening_digest(record.prompt))

    return encode_records(data, Demonstration, loaded, limits, skip_bad_rows, encode_one)


def encode_rankings(
    data: Data,
    loaded: LoadedModel,
    limits: Limits,
    skip_bad_rows: bool,
    whole_turns: bool = False,
    soft_targets: bool = False,
) -> list[EncodedRanking]:
    """Return rankings whose prompt and responses are all within the limits; raises as `encode_records`.

    A ranking that ties all responses is left out and counted.

    Args:
        whole_turns: responses include the text that the template writes after them, as other libraries' reward models read
            it.
        soft_targets: keep a ranking of tied responses that has `preferences`, which give its pairs.
    """
    tied = 0

    def encode_one(record: Ranking, apply_limits: ApplyLimits) -> Iterator[EncodedRanking]:
        nonlocal tied
        if record.all_tied and not (soft_targets and record.preferences is not None):
            tied += 1
            return
        prompt, responses = _ranking_ids(loaded.tokenization, record, whole_turns)
        kept = [apply_limits(prompt, response) for response in responses]
        fitted = [pair for pair in kept if pair is not None]
        if len(fitted) == len(kept):
            labels = (list(record.ranks), record.margin or 0.0, record.category, record.preferences)
            ids = [pair.response for pair in fitted]
            yield EncodedRanking(fitted[0].prompt, ids, *labels, opening_digest(record.prompt))

    encoded = encode_records(data, Ranking, loaded, limits, skip_bad_rows, encode_one)
    if tied and os.environ.get("RANK", "0") == "0":
        left_out = counted(tied, "ranking")
        logger.warning("%s: left out %s with all responses tied: ties add nothing to a loss", data_name(data), left_out)
    return encoded


def _ranking_ids(tokenization: Tokenization, record: Ranking, whole_turns: bool) -> tuple[list[int], list[list[int]]]:
    if not whole_turns:
        return tokenization.answers_ids(record.prompt, record.responses)
    pairs = [tokenization.whole_turn_ids(record.prompt, text) for text in record.responses]
    shared = min(len(prompt) for prompt, _ in pairs)  # a response's first token may join the prompt's last
    return pairs[0][0][:shared], [[*prompt[shared:], *response] for prompt, response in pairs]


def encode_prompts(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedPrompt]:
    """Return prompts to sample responses of up to `limits.response` tokens to; raises as `encode_records`."""

    def encode_one(record: Prompt, apply_limits: ApplyLimits) -> Iterable[EncodedPrompt]:
        return filter(None, [encode_prompt(record, loaded, apply_limits)])

    return encode_records(data, Prompt, loaded, limits, skip_bad_rows, encode_one)


def encode_prompt(record: Prompt, loaded: LoadedModel, apply_limits: ApplyLimits) -> EncodedPrompt | None:
    """Return a prompt within the limits, or None if it is dropped. Token ids in the data are kept."""
    if record.ids is None:
        kept = apply_limits(loaded.tokenization.prompt_ids(record.prompt), None)
        return None if kept is None else EncodedPrompt(record.prompt, kept.prompt, record.category, record.id)
    tokenizer = loaded.tokenization.tokenizer
    highest = max(record.ids)
    if highest >= len(tokenizer):
        wrong = f"has the id {highest}, but the model's tokenizer has {len(tokenizer)} tokens"
        raise ConversationError(f"field 'input_ids': {wrong}; tokenize the prompts with the model's own tokenizer")
    kept = apply_limits(list(record.ids), None)
    if kept is None:
        return None
    conversation = record.prompt or decoded_turn(kept.prompt, loaded.tokenization)
    return EncodedPrompt(conversation, kept.prompt, record.category, record.id, given_as_ids=True)


def decoded_turn(ids: list[int], tokenization: Tokenization) -> Conversation:
    """Return one user turn with the text of a prompt of token ids, without special tokens."""
    text = tokenization.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return user_turn(str(text))


def encode_response(
    prompt: Conversation, response: str, loaded: LoadedModel, limits: Limits, where: str, counts: OverlongCounts
) -> PromptResponse | None:
    """Return a prompt and its response within the limits, or None if they are dropped; `where` names them in an error."""
    try:
        ids = loaded.tokenization.answer_ids(prompt, response)
    except ConversationError as error:
        raise UserError(f"{where}: {error}") from error
    kept = _within_limits(loaded.tokenization, limits, where, prompt, *ids)
    counts.add(limits.exceeded(*ids), kept is not None)
    return kept
