"""Encode records as token ids, within length limits."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from align.batches.limits import Limits, OverlongCounts, OverlongError
from align.batches.mixtures import Data, data_name, split_prefix
from align.core.errors import UserError, counted
from align.data.conversation import user_turn
from align.data.formats import kind_name
from align.data.readers import report_single, scan_records, scan_rows, warn_of_bad_rows
from align.data.records import Conversation, Demonstration, Prompt, Ranking, Record, ranks_from_scores
from align.data.sources import SourceRow
from align.models.loading import LoadedModel
from align.tokenization import ConversationError, Tokenization, encode_demonstration
from align.tokenization.encoded import EncodedDemonstration, EncodedPrompt, EncodedRanking, PromptResponse, opening_digest

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
Example = TypeVar("Example")
ApplyLimits = Callable[[list[int], list[int] | None], PromptResponse | None]
"""Applies the limits to a prompt and a response, see `_within_limits`. Returns None if the record is dropped."""
NO_END_TOKEN, SCORED_AT_END = "no EOS is trained after them", "they are scored at EOS, like complete ones"
"""How to handle responses that were truncated at a limit."""
TIED = "with all responses tied: ties do not contribute to the loss"
EQUAL = "have responses with identical token ids, which count as ties; rankings without other pairs are skipped"


def encode_records(
    data: Data,
    kind: type[R],
    loaded: LoadedModel,
    limits: Limits,
    skip_bad_rows: bool,
    encode_one: Callable[[R, ApplyLimits], Iterable[Example]],
    kept_end: int = 0,
) -> list[Example]:
    """Read records and encode them as token ids.

    Args:
        encode_one: yields a record's examples. It passes prompts and responses through its `ApplyLimits` argument.
        kept_end: number of tokens at the end of a response that truncation keeps, because the score is read there.

    Raises:
        UserError: if a record exceeds the limits or the model's context, or no records are left.
    """
    source, name = split_prefix(data)[0], kind_name(kind)
    source = source if isinstance(source, str) else f"{name}s in memory"
    encoded: list[Example] = []
    spelled: list[str] = []
    unknown: list[str] = []  # records with unknown characters
    refused: list[str] = []  # errors of the chat template or tokenizer
    twice, doubled, cut = 2 * tuple(loaded.tokenization.chat.opening_ids), 0, 0
    counts = OverlongCounts(limits)
    for number, record in enumerate(records_of(data, kind, skip_bad_rows), start=1):
        spelled += filter(None, [_spelled_token(record, loaded.tokenization)])
        doubled += bool(twice) and (getattr(record, "ids", None) or ())[: len(twice)] == twice
        cut += bool(getattr(record, "cut_responses", 0))
        where = f"{source}: record {record.id or number}"
        over: dict[str, int] = {}
        examples: list[Example] = []
        try:
            examples = _encode_record(record, where, loaded, limits, encode_one, unknown, kept_end, over)
        except OverlongError as error:
            counts.error = counts.error or error
        except ConversationError as error:
            refused.append(f"{where}: {error}")
            if not skip_bad_rows:
                raise UserError(refused[0]) from error
        counts.add(over, len(examples))
        encoded += examples
    counts.raise_error(name)
    if refused and encoded:
        warn_of_bad_rows(f"{source}: skipped", refused, counts.records)
    if os.environ.get("RANK", "0") == "0":
        if cut:
            logger.warning(
                "%s: %d of %d %ss have responses truncated at the token limit (finish_reason); %s",
                *(source, cut, counts.records, name, SCORED_AT_END if kept_end else NO_END_TOKEN),
            )
        _warn_of_tokens(source, f"{counts.records} {name}s", spelled, doubled, unknown, loaded.tokenization)
    counts.report(source, name)
    if not encoded:
        raise UserError(f"{source}: {_why_nothing_is_left(name, counts, refused)}")
    return encoded


def _why_nothing_is_left(name: str, counts: OverlongCounts, refused: Sequence[str]) -> str:
    if refused:
        return f"no usable {name}; {len(refused)} of {counts.records} {name}s are invalid, the first: {refused[0]}"
    if name == kind_name(Ranking) and counts.records and not counts.dropped:
        return f"all {counts.records} rankings are fully tied: no pairs to train on"
    if not counts.records:
        return f"no {name}s; add at least one"
    return f"all {name}s exceed the limits; raise them, or set overlong to truncate"


def _warn_of_tokens(
    source: str, records: str, spelled: Sequence[str], doubled: int, unknown: Sequence[str], tokenization: Tokenization
) -> None:
    """Log tokenizer warnings about the data. `records` describes the records with their count. For other arguments, see
    `encode_records`.
    """
    if spelled:
        logger.warning(
            "%s: %d of %s spell special tokens such as %r, which are read as plain characters; if a chat template "
            "wrote these texts, give their turns as role and content, or their token ids as input_ids",
            *(source, len(spelled), records, spelled[0]),
        )
    if doubled:
        logger.warning(
            "%s: %d of %s begin with a duplicate start token; tokenize the output of a chat template with "
            "add_special_tokens=False",
            *(source, doubled, records),
        )
    if unknown:
        logger.warning(
            "%s: %d of %s have characters unknown to the tokenizer, encoded as %r (first: %s)",
            *(source, len(set(unknown)), records, tokenization.tokenizer.unk_token),
            unknown[0].removeprefix(f"{source}: "),
        )


def _spelled_token(record: Record, tokenization: Tokenization) -> str | None:
    """Return a special token spelled out in a record's text, usually because a chat template was already applied."""
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
    kept_end: int,
    over: dict[str, int],
) -> list[Example]:
    """Return a record's examples.

    Args:
        unknown: receives `where` if a character of the record is unknown to the tokenizer.
        over: receives the maximum excess tokens for each limit, by setting.
    """

    def apply_limits(prompt: list[int], response: list[int] | None) -> PromptResponse | None:
        if loaded.tokenization.chat.unknown_id in (*prompt, *(response or ())):
            unknown.append(where)
        for setting, tokens in limits.exceeded(prompt, response or ()).items():
            over[setting] = max(tokens, over.get(setting, 0))
        kept = _within_limits(loaded.tokenization, limits, where, record.prompt, prompt, response or [], kept_end)
        if kept is not None:  # reserve room for the longest response to be sampled
            longest = limits.response if response is None else len(kept.response)
            loaded.backbone.require_fit(len(kept.prompt), longest, where)
        return kept

    return list(encode_one(record, apply_limits))


def _within_limits(
    tokenization: Tokenization,
    limits: Limits,
    where: str,
    turns: Conversation,
    prompt: list[int],
    response: list[int],
    kept_end: int = 0,
) -> PromptResponse | None:
    """Apply the limits to a prompt and a response. Truncation keeps the beginning of the prompt with its system turn.

    Args:
        turns: conversation turns at the beginning of `prompt`; empty if the record holds token ids.
        kept_end: see `encode_records`.
    """
    before = tokenization.fixed_before
    if turns and limits.overlong == "truncate" and len(prompt) > limits.prompt:
        before = max(before, tokenization.head_length(turns))
        if before >= limits.prompt:
            raise UserError(
                f"{where}: the beginning of the prompt with its system turn has {before} tokens, which truncation keeps, "
                f"but the limit is {limits.prompt}; raise the limit, shorten the system turn, or set overlong to drop"
            )
    return limits.apply(prompt, response, where, (before, max(kept_end, tokenization.fixed_after)))


def records_of(data: Data, kind: type[R], skip_bad_rows: bool) -> Iterator[R]:
    """Yield records from a file or from memory, without judgments overruled by a lead's decision.

    A record without an id gets its row number.
    """
    source, prefix = split_prefix(data)
    records: Sequence[R]
    if isinstance(source, str):
        records = scan_records(source, kind, skip_bad_rows=skip_bad_rows, token_ids=True, number_rows=True).records
    else:
        records = _records_in_memory(source, kind)
    valid = [record for record in records if not getattr(record, "overruled", None)]
    overruled = len(records) - len(valid)
    if overruled and os.environ.get("RANK", "0") == "0":
        logger.warning("%s: left out %s overruled by leads", data_name(data), counted(overruled, kind_name(kind)))
    for record in valid:
        yield _with_prefix(record, prefix) if prefix else record


def _records_in_memory(data: Any, kind: type[R]) -> Sequence[R]:
    source = f"{kind_name(kind)}s in memory"
    if isinstance(data, Mapping) or hasattr(data, "iterrows"):  # iterating would yield column names as prompts
        remedy = "pass a list of rows, or one split of a DatasetDict, such as data['train']"
        raise UserError(f"{source}: is a {type(data).__name__}, not a sequence of rows; {remedy}")
    rows = (SourceRow(f"{source}: item {number}", _row_of(item)) for number, item in enumerate(data, start=1))
    scanned = scan_rows(rows, kind, stop_at_bad=True, number_rows=True)
    report_single(scanned, source)
    return scanned.records


def _row_of(item: Any) -> Any:
    """Return the row of an in-memory item, which may be a prompt as text or token ids."""
    if isinstance(item, str):
        return {"prompt": item}
    ids = item.tolist() if hasattr(item, "tolist") else item
    is_ids = isinstance(ids, list | tuple) and len(ids) > 0 and all(isinstance(token, int) for token in ids)
    return {"input_ids": ids} if is_ids else item


def _with_prefix(record: R, prefix: str) -> R:
    turns = list(record.prompt)
    if getattr(record, "ids", None) is not None:
        raise UserError("task_prefixes cannot be used with prompts given as token ids (input_ids)")
    first = next(place for place, turn in enumerate(turns) if turn["role"] == "user")
    turns[first] = {"role": "user", "content": prefix + turns[first]["content"]}
    return replace(record, prompt=tuple(turns))  # type: ignore[type-var]  # every record is a dataclass


def encode_demonstrations(
    data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool
) -> list[EncodedDemonstration]:
    """Encode the assistant turns of demonstrations as examples. For errors, see `encode_records`."""

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
    scored: bool = True,
) -> list[EncodedRanking]:
    """Encode rankings whose prompt and responses are all within the limits. For errors, see `encode_records`.

    Responses with equal token ids, for example after truncation, share the mean of their ranks. A ranking in which all
    responses are tied is left out and counted.

    Args:
        whole_turns: whether responses include the text that the template writes after them, as other libraries' reward
            models expect.
        soft_targets: whether to keep a ranking of tied responses that has `preferences`, which define its pairs.
        scored: whether a truncated response gets an end token, at which this package's reward models read the score. False
            for a language model, which must not learn to end there.
    """
    tied = equal = 0
    tokenization, at_end = loaded.tokenization, scored and not whole_turns

    def encode_one(record: Ranking, apply_limits: ApplyLimits) -> Iterator[EncodedRanking]:
        nonlocal tied, equal
        soft = soft_targets and record.preferences is not None
        if record.all_tied and not soft:
            tied += 1
            return
        prompt, responses = _ranking_ids(tokenization, record, whole_turns, at_end)
        kept = [apply_limits(prompt, response) for response in responses]
        fitted = [pair.response for pair in kept if pair is not None]
        if len(fitted) < len(kept):
            return
        ranks, preferences = tie_equal_responses(fitted, record)
        equal += ranks != list(record.ranks)
        if len(set(ranks)) == 1 and not (soft and len(set(map(tuple, fitted))) > 1):
            return
        lengths = zip(record.is_complete, fitted, responses, strict=True)
        ended = [complete and len(ids) == len(full) for complete, ids, full in lengths]
        yield EncodedRanking(
            prompt=kept[0].prompt if kept[0] is not None else prompt,
            responses=fitted,
            ranks=ranks,
            margin=record.margin or 0.0,
            category=record.category,
            preferences=preferences,
            opening=opening_digest(record.prompt),
            ended=None if all(ended) or not at_end else ended,
        )

    encoded = encode_records(data, Ranking, loaded, limits, skip_bad_rows, encode_one, kept_end=int(at_end))
    if os.environ.get("RANK", "0") == "0":
        if tied:
            logger.warning("%s: skipped %s %s", data_name(data), counted(tied, "ranking"), TIED)
        if equal:
            logger.warning("%s: %s %s", data_name(data), counted(equal, "ranking"), EQUAL)
    return encoded


def tie_equal_responses(
    responses: Sequence[Sequence[int]], record: Ranking
) -> tuple[list[int], Sequence[Sequence[float]] | None]:
    """Return a ranking's ranks and preferences with responses of identical token ids tied, since no loss can separate them.

    Equal responses [K] get the mean of their ranks. The others keep their order.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, ids in enumerate(responses):
        places.setdefault(tuple(ids), []).append(place)
    if len(places) == len(responses):
        return list(record.ranks), record.preferences
    group_of = [places[tuple(ids)] for ids in responses]
    means = [sum(record.ranks[place] for place in group) / len(group) for group in group_of]
    preferences = record.preferences
    if preferences is not None:
        preferences = tuple(
            tuple(0.0 if j in group_of[i] else value for j, value in enumerate(row)) for i, row in enumerate(preferences)
        )
    return list(ranks_from_scores([-mean for mean in means])), preferences


def _ranking_ids(
    tokenization: Tokenization, record: Ranking, whole_turns: bool, at_end: bool
) -> tuple[list[int], list[list[int]]]:
    if not whole_turns:
        return tokenization.answers_ids(record.prompt, record.responses, ended=None if at_end else record.is_complete)
    complete = zip(record.responses, record.is_complete, strict=True)
    pairs = [tokenization.whole_turn_ids(record.prompt, text, is_complete) for text, is_complete in complete]
    shared = min(len(prompt) for prompt, _ in pairs)  # the first response token may merge with the last prompt token
    return pairs[0][0][:shared], [[*prompt[shared:], *response] for prompt, response in pairs]


def encode_prompts(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedPrompt]:
    """Encode prompts, to be followed by up to `limits.response` sampled tokens. Raises as `encode_records`."""

    def encode_one(record: Prompt, apply_limits: ApplyLimits) -> Iterable[EncodedPrompt]:
        return filter(None, [encode_prompt(record, loaded, apply_limits)])

    return encode_records(data, Prompt, loaded, limits, skip_bad_rows, encode_one)


def encode_prompt(record: Prompt, loaded: LoadedModel, apply_limits: ApplyLimits) -> EncodedPrompt | None:
    """Encode a prompt within the limits, or return None if it is dropped. Token ids given in the data are kept."""
    if record.ids is None:
        kept = apply_limits(loaded.tokenization.prompt_ids(record.prompt), None)
        if kept is None:
            return None
        return EncodedPrompt(record.prompt, kept.prompt, record.category, record.id, columns=record.columns)
    tokenizer = loaded.tokenization.tokenizer
    highest = max(record.ids)
    if highest >= len(tokenizer):
        wrong = f"contains id {highest}, but the model's tokenizer has {len(tokenizer)} tokens"
        raise ConversationError(f"field 'input_ids': {wrong}; tokenize the prompts with the model's tokenizer")
    kept = apply_limits(list(record.ids), None)
    if kept is None:
        return None
    conversation = record.prompt or decoded_turn(kept.prompt, loaded.tokenization)
    about = (record.category, record.id)
    return EncodedPrompt(conversation, kept.prompt, *about, given_as_ids=True, columns=record.columns)


def decoded_turn(ids: list[int], tokenization: Tokenization) -> Conversation:
    """Return one user turn with the decoded text of a prompt given as token ids, without special tokens."""
    text = tokenization.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return user_turn(str(text))


def encode_response(
    prompt: Conversation, response: str, loaded: LoadedModel, limits: Limits, where: str, counts: OverlongCounts
) -> PromptResponse | None:
    """Encode a prompt and its response within the limits, or return None if dropped. `where` identifies them in errors.

    `counts` keeps the error of the first overlong one.
    """
    try:
        ids = loaded.tokenization.answer_ids(prompt, response)
    except ConversationError as error:
        raise UserError(f"{where}: {error}") from error
    kept = None
    try:
        kept = _within_limits(loaded.tokenization, limits, where, prompt, *ids, kept_end=1)
    except OverlongError as error:
        counts.error = counts.error or error
    counts.add(limits.exceeded(*ids), kept is not None)
    return kept
