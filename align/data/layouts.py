"""Layouts: TRL's pairs, transcripts as in HH-RLHF, rows of `align sample`, ratings, conversation trees.

A function `..._prompt` returns the fields of a `Prompt`; the others return records.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from align.data.conversation import (
    Conversation,
    Message,
    assistant_turn,
    check_answer,
    check_conversation,
    check_prompt,
)
from align.data.fields import (
    Row,
    check_list,
    check_score,
    check_scores,
    check_text,
    check_texts,
    field_error,
    id_or_none,
    required_field,
    short_repr,
    text_or_none,
)
from align.data.records import Demonstration, Prompt, Ranking, Record, evenly_spaced, ranks_from_scores, set_checked
from align.data.transcripts import joined, prompt_turns, transcript_turns

Fields = dict[str, Any]
Reader = Callable[[Row], Fields]
Matcher = Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Format:
    """A row layout: its fields in words, a predicate, and a conversion to records.

    Attributes:
        prompt: function that returns the fields of a row's `Prompt`. None if the row has a field `prompt` or is a tree.
    """

    name: str
    kind: type[Record]
    fields: str
    matches: Matcher
    convert: Callable[[Row], Sequence[Record]]
    prompt: Reader | None = None


def has(*fields: str, without: tuple[str, ...] = ()) -> Matcher:
    """Return whether a row has all `fields` and none of `without`. None counts as missing."""
    return lambda row: all(row.get(f) is not None for f in fields) and all(row.get(f) is None for f in without)


def has_any(*fields: str) -> Matcher:
    """Return whether a row has any of a layout's fields. Conversion then reports the missing ones."""
    return lambda row: any(row.get(field) is not None for field in fields)


def id_and_category(row: Row) -> dict[str, Any]:
    """Return `id` and `category` if the row has valid ones."""
    return {"id": id_or_none(row.get("id")), "category": text_or_none(row.get("category"))}


def _pair_ranking(row: Row, prompt: object, chosen: object, rejected: object, *, may_be_empty: bool = False) -> list[Record]:
    """Build a ranking of two responses, tied if their scores are equal."""
    responses = {"chosen": chosen, "rejected": rejected}
    texts = tuple(check_answer(answer, name, may_be_empty=may_be_empty) for name, answer in responses.items())
    if texts[0] == texts[1]:
        raise field_error("rejected", "is identical to 'chosen'", "remove the row")
    return [
        Ranking(
            prompt=check_prompt(prompt),
            responses=texts,
            ranks=(1, 1) if check_scores(row) else (1, 2),
            margin=row.get("margin"),
            labeler=row.get("labeler"),
            finish_reason=row.get("finish_reason"),
            overruled=row.get("overruled"),
            **id_and_category(row),
        )
    ]


def prompt_field(row: Row) -> Fields:
    """Read the prompt of a row with the field `prompt`."""
    return {"prompt": required_field(row, "prompt", "add the prompt"), **id_and_category(row)}


def messages_prompt(row: Row) -> Fields:
    """Return all turns up to the last user turn. A final answer is ignored."""
    turns = check_conversation(row["messages"], "messages")
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)
    return {"prompt": turns[: last + 1], **id_and_category(row)}


# --- TRL's preference form: prompt, chosen, rejected ---


def pair(row: Row) -> list[Record]:
    """Convert a pair of responses or conversations. Full conversations (TRL's implicit prompt, UltraFeedback) are split."""
    chosen = required_field(row, "chosen", "a pair needs prompt, chosen and rejected")
    rejected = required_field(row, "rejected", "a pair needs prompt, chosen and rejected")
    if _is_whole_conversation(chosen) or _is_whole_conversation(rejected):
        asked, turns = row.get("prompt"), check_conversation(chosen, "chosen")
        _check_asked(asked, turns)
        return _pair_of_conversations(row, turns, check_conversation(rejected, "rejected"))
    prompt = required_field(row, "prompt", "add the prompt of both responses")
    # the labeling app may export judged empty answers
    return _pair_ranking(row, prompt, chosen, rejected, may_be_empty=True)


def _is_whole_conversation(turns: object) -> bool:
    """Return whether a list of turns starts with the prompt instead of the answer."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _check_asked(asked: object, turns: Conversation) -> None:
    """Reject a `prompt` that contradicts the full conversation beside it."""
    if isinstance(asked, list | tuple):
        is_part = check_prompt(asked) == turns[-1 - len(asked) : -1]
    else:
        said = [turn["content"].split() for turn in turns[:-1] if turn["role"] == "user"]
        is_part = not isinstance(asked, str) or asked.split() in said
    if not is_part:
        raise field_error("prompt", "differs from the turns of 'chosen' before the last one", "remove one of them")


def is_whole_pair(row: Row) -> bool:
    """Return whether `chosen` is a full conversation."""
    return _is_whole_conversation(row.get("chosen"))


def _pair_of_conversations(row: Row, chosen: Conversation, rejected: Conversation) -> list[Record]:
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1]["role"] != "assistant":
            raise field_error(field, "ends with a user turn", "end it with the response")
    if chosen[:-1] != rejected[:-1]:
        wrong = "differs from 'chosen' before its last turn"
        raise field_error("rejected", wrong, "use the same prompt for both or remove the row")
    return _pair_ranking(row, chosen[:-1], chosen[-1]["content"], rejected[-1]["content"])


def pair_prompt(row: Row) -> dict[str, Any]:
    """Return the shared prompt of a pair of full conversations: the turns of `chosen` before the last one."""
    turns = check_conversation(row["chosen"], "chosen")
    _check_asked(row.get("prompt"), turns)
    return {"prompt": turns[:-1], **id_and_category(row)}


# --- Transcripts ---


def _transcript(row: Row, field: str) -> Conversation:
    """Parse the turns of a transcript. The last one may be empty."""
    turns = transcript_turns(check_text(required_field(row, field, "write the transcript"), field))
    if turns is None:
        wrong = "is not a transcript that begins with 'Human:', and there is no 'prompt'"
        raise field_error(field, wrong, "add the field prompt")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in joined(turns))


def with_parsed_prompt(row: Row) -> Row:
    """Return the row with its text `prompt` parsed into turns, see `prompt_turns`."""
    prompt = row.get("prompt")
    turns = prompt_turns(prompt) if isinstance(prompt, str) else None
    return row if turns is None else {**row, "prompt": turns}


def hh_pair(row: Row) -> list[Record]:
    """Convert two transcripts that differ in the last assistant turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    return _pair_of_conversations(row, _transcript(row, "chosen"), _transcript(row, "rejected"))


def hh_prompt(row: Row) -> dict[str, Any]:
    """Return the turns of `chosen` before the last assistant turn."""
    turns = _transcript(row, "chosen")
    return {"prompt": turns[:-1] if turns[-1]["role"] == "assistant" else turns, **id_and_category(row)}


# --- Rows of `align sample` ---


def sampled_demonstrations(row: Row) -> list[Record]:
    """Convert each response of an `align sample` row to a demonstration, for example the best of n."""
    prompt, id_fields = check_prompt(row["prompt"]), id_and_category(row)
    texts = check_texts(row["responses"], "responses")
    reasons = row.get("finish_reason")
    reasons = [None] * len(texts) if reasons is None else check_texts(reasons, "finish_reason", len(texts))
    return [
        Demonstration(prompt=prompt, continuation=assistant_turn(text), finish_reason=reason, **id_fields)
        for text, reason in zip(texts, reasons, strict=True)
    ]


# --- Ratings of single answers, one a row, and the rankings that the answers to one prompt make together ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer(Record):
    """A response with a numeric rating, such as stars. Higher is better."""

    prompt: Conversation
    response: str
    rating: float
    id: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        response = check_answer(self.response, "response", may_be_empty=True)
        rating = check_score(self.rating, "rating")
        if not math.isfinite(rating):  # the mean rating may be NaN
            raise field_error("rating", f"is {rating}", "use a finite number")
        set_checked(self, prompt=check_prompt(self.prompt), response=response, rating=rating)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Parse a row of another project without checking for misspelled field names."""
        needed = {name: required_field(row, name, "add it") for name in ("prompt", "response", "rating")}
        return cls(**needed, id=row.get("id"), category=row.get("category"))


def rank_ratings(answers: Iterable[RatedAnswer]) -> tuple[list[Ranking], int]:
    """Build one ranking per prompt with two or more responses. Also return the number of prompts with only one.

    A response that occurs more than once, as with several labelers, gets the mean of its ratings. Of more than nine
    responses, nine evenly spaced by rank are kept.
    """
    by_prompt: dict[tuple[tuple[str, str], ...], list[RatedAnswer]] = {}
    for answer in answers:
        by_prompt.setdefault(tuple((turn["role"], turn["content"]) for turn in answer.prompt), []).append(answer)
    rankings: list[Ranking] = []
    for group in by_prompt.values():
        ratings: dict[str, list[float]] = {}
        for answer in group:
            ratings.setdefault(answer.response, []).append(answer.rating)
        if len(ratings) < 2:
            continue
        means = {text: round(sum(values) / len(values), 9) for text, values in ratings.items()}  # (4.1 + 4.3) / 2 equals 4.2
        order = sorted(means, key=lambda text: -means[text])
        kept = {order[i] for i in evenly_spaced(len(order))}
        responses = tuple(text for text in means if text in kept)
        ranks, first = ranks_from_scores([means[text] for text in responses]), group[0]
        rankings.append(Ranking(prompt=first.prompt, responses=responses, ranks=ranks, id=first.id, category=first.category))
    return rankings, len(by_prompt) - len(rankings)


# ------------------------------------------------------------------------------------------- OpenAssistant's message trees

# Conversation trees: prompter turns with answers ranked by volunteers (0 is the best sibling), and replies to each.
# Source: `.trees.jsonl.gz` of OpenAssistant/oasst1 and oasst2 (Koepf et al. 2023), with the fields defined in
# oasst-data/oasst_data/schemas.py of LAION-AI/Open-Assistant. Messages that were deleted or rejected in review
# (`review_result` false) are skipped together with all their replies.

Node = Mapping[str, Any]
ROLE_NAMES = {"prompter": "user", "assistant": "assistant"}


def is_tree(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a tree of messages."""
    return isinstance(row.get("prompt"), Mapping) and "replies" in row["prompt"]


def tree_demonstrations(row: Mapping[str, Any]) -> list[Record]:
    """Return the conversations in which every answer is the best among its siblings. Each assistant turn occurs in one
    record.

    Of several prompters' replies to one answer, the first (best-ranked) continues the record and each other one starts a
    new record. Unranked siblings have no best: the path ends.
    """
    records: list[Record] = []
    starts: list[tuple[Conversation, Node]] = [((), row["prompt"])] if _usable(row["prompt"]) else []
    while starts:
        before, node = starts.pop(0)
        prompt: Conversation = (*before, _turn(node))
        learned: Conversation = ()
        last: Node | None = None
        while (best := _best_answer(node)) is not None:
            learned, last = (*learned, _turn(best)), best
            replies = _ordered(_replies(best, "prompter"))
            if not replies:
                break
            starts += [((*prompt, *learned), other) for other in replies[1:]]
            node = replies[0]
            learned = (*learned, _turn(node))
        if last is not None:
            while learned[-1]["role"] == "user":  # a prompter turn without an answer
                learned = learned[:-1]
            records.append(Demonstration(prompt=prompt, continuation=learned, id=last.get("message_id")))
    return records


def tree_rankings(row: Mapping[str, Any]) -> list[Record]:
    """Build one ranking per prompter turn with two or more ranked answers. Keeps at most nine, evenly spaced by rank."""
    records: list[Record] = []
    for prompt, node in _prompter_nodes((), row["prompt"]):
        ranked = _ordered([reply for reply in _replies(node, "assistant") if _rank(reply) is not None])
        if len(ranked) < 2:
            continue
        kept = [ranked[i] for i in evenly_spaced(len(ranked))]
        responses = tuple(_turn(reply)["content"] for reply in kept)
        ranks = tuple(1 + (_rank(reply) or 0) for reply in kept)
        records.append(Ranking(prompt=prompt, responses=responses, ranks=ranks, id=node.get("message_id")))
    return records


def tree_prompts(row: Mapping[str, Any]) -> list[Record]:
    """Return each prompter's turn of a tree as a prompt, with the turns before it."""
    nodes = _prompter_nodes((), row["prompt"])
    return [Prompt(prompt=prompt, id=node.get("message_id")) for prompt, node in nodes]


def _prompter_nodes(before: Conversation, node: Node) -> Iterator[tuple[Conversation, Node]]:
    if not _usable(node):
        return
    prompt = (*before, _turn(node))
    yield prompt, node
    for answer in _replies(node, "assistant"):
        for reply in _replies(answer, "prompter"):
            yield from _prompter_nodes((*prompt, _turn(answer)), reply)


def _replies(node: Node, role: str) -> list[Node]:
    replies = check_list(node.get("replies") or [], "replies")
    for reply in replies:
        if not isinstance(reply, Mapping) or reply.get("role") != role:
            wrong = f"has {short_repr(reply)} where a message of the {role} belongs"
            raise field_error("replies", wrong, "correct the tree")
    return [reply for reply in replies if _usable(reply)]


def _usable(node: Node) -> bool:
    return not node.get("deleted") and node.get("review_result") is not False


def _turn(node: Node) -> Message:
    role = node.get("role")
    if role not in ROLE_NAMES:
        raise field_error("role", f"is {short_repr(role)}", "use prompter or assistant")
    text = check_text(required_field(node, "text", "add the text of the message"), "text")
    return {"role": ROLE_NAMES[role], "content": text}


def _rank(node: Node) -> int | None:
    rank = node.get("rank")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
        raise field_error("rank", f"is {short_repr(rank)}", "use a whole number, 0 for the best, or null")
    return rank


def _ordered(nodes: list[Node]) -> list[Node]:
    """Sort best first. Unranked ones come last in their original order."""
    return sorted(nodes, key=lambda node: (_rank(node) is None, _rank(node) or 0))


def _best_answer(node: Node) -> Node | None:
    answers = _ordered(_replies(node, "assistant"))
    if not answers or (len(answers) > 1 and _rank(answers[0]) is None):
        return None
    return answers[0]
