"""The form of a layout; pairs in TRL's form, transcripts as in HH-RLHF, rows of `align sample`, ratings, trees.

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
    """One layout of rows: its fields in words, whether a row has it, and its conversion into records.

    Attributes:
        prompt: returns the fields of a row's `Prompt`; None if the row has a field `prompt`, or is a tree.
    """

    name: str
    kind: type[Record]
    fields: str
    matches: Matcher
    convert: Callable[[Row], Sequence[Record]]
    prompt: Reader | None = None


def has(*fields: str, without: tuple[str, ...] = ()) -> Matcher:
    """Whether a row has all `fields` and none of `without`; None counts as missing."""
    return lambda row: all(row.get(f) is not None for f in fields) and all(row.get(f) is None for f in without)


def has_any(*fields: str) -> Matcher:
    """Whether a row has one of its layout's fields: the error then names the missing one."""
    return lambda row: any(row.get(field) is not None for field in fields)


def id_and_category(row: Row) -> dict[str, Any]:
    """Both, if the row has them in a usable form."""
    return {"id": id_or_none(row.get("id")), "category": text_or_none(row.get("category"))}


def _pair_ranking(row: Row, prompt: object, chosen: object, rejected: object, *, may_be_empty: bool = False) -> list[Record]:
    """A ranking of two responses, a tie if their scores are equal."""
    given = {"chosen": chosen, "rejected": rejected}
    texts = tuple(check_answer(answer, name, may_be_empty=may_be_empty) for name, answer in given.items())
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
            **id_and_category(row),
        )
    ]


def prompt_field(row: Row) -> Fields:
    """Read the prompt of a row with the field `prompt`."""
    return {"prompt": required_field(row, "prompt", "add the prompt"), **id_and_category(row)}


def messages_prompt(row: Row) -> Fields:
    """All turns up to the user's last one: an answer behind it is not read."""
    turns = check_conversation(row["messages"], "messages")
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)
    return {"prompt": turns[: last + 1], **id_and_category(row)}


# --- TRL's preference form: prompt, chosen, rejected ---


def pair(row: Row) -> list[Record]:
    """Text or turns; turns of the whole conversation, as in TRL's implicit prompt or UltraFeedback, are split."""
    chosen = required_field(row, "chosen", "a pair needs prompt, chosen and rejected")
    rejected = required_field(row, "rejected", "a pair needs prompt, chosen and rejected")
    if _is_whole_conversation(chosen) or _is_whole_conversation(rejected):
        asked, turns = row.get("prompt"), check_conversation(chosen, "chosen")
        _check_asked(asked, turns)
        return _pair_of_conversations(row, turns, check_conversation(rejected, "rejected"))
    prompt = required_field(row, "prompt", "add the prompt of both responses")
    # as the labeling app exports them: a policy's answer may be empty, and somebody has judged it
    return _pair_ranking(row, prompt, chosen, rejected, may_be_empty=True)


def _is_whole_conversation(turns: object) -> bool:
    """Whether a list of turns begins with the prompt, and not with the answer to it."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _check_asked(asked: object, turns: Conversation) -> None:
    """Refuse a `prompt` beside a whole conversation that is not part of it: the turns before the last, or a user's turn."""
    if isinstance(asked, list | tuple):
        is_part = check_prompt(asked) == turns[-1 - len(asked) : -1]
    else:
        said = [turn["content"].split() for turn in turns[:-1] if turn["role"] == "user"]
        is_part = not isinstance(asked, str) or asked.split() in said
    if not is_part:
        raise field_error("prompt", "differs from the turns of 'chosen' before the last one", "remove one of them")


def is_whole_pair(row: Row) -> bool:
    """Whether `chosen` is a whole conversation."""
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
    """The prompt of a pair of whole conversations: the turns of `chosen` before the last."""
    turns = check_conversation(row["chosen"], "chosen")
    _check_asked(row.get("prompt"), turns)
    return {"prompt": turns[:-1], **id_and_category(row)}


# --- Transcripts ---


def _transcript(row: Row, field: str) -> Conversation:
    """The turns of a transcript; the last may be empty."""
    turns = transcript_turns(check_text(required_field(row, field, "write the transcript"), field))
    if turns is None:
        wrong = "is not a transcript that begins with 'Human:', and there is no 'prompt'"
        raise field_error(field, wrong, "add the field prompt")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in joined(turns))


def with_parsed_prompt(row: Row) -> Row:
    """The row, with a `prompt` that is a conversation in one text as turns, see `prompt_turns`."""
    prompt = row.get("prompt")
    turns = prompt_turns(prompt) if isinstance(prompt, str) else None
    return row if turns is None else {**row, "prompt": turns}


def hh_pair(row: Row) -> list[Record]:
    """Two transcripts that differ in the assistant's last turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    return _pair_of_conversations(row, _transcript(row, "chosen"), _transcript(row, "rejected"))


def hh_prompt(row: Row) -> dict[str, Any]:
    """The turns before the assistant's last one in `chosen`."""
    turns = _transcript(row, "chosen")
    return {"prompt": turns[:-1] if turns[-1]["role"] == "assistant" else turns, **id_and_category(row)}


# --- Rows of `align sample` ---


def sampled_demonstrations(row: Row) -> list[Record]:
    """A demonstration for each response of a row of `align sample`, such as the best of n answers."""
    prompt, more = check_prompt(row["prompt"]), id_and_category(row)
    texts = check_texts(row["responses"], "responses")
    reasons = row.get("finish_reason")
    reasons = [None] * len(texts) if reasons is None else check_texts(reasons, "finish_reason", len(texts))
    return [
        Demonstration(prompt=prompt, continuation=assistant_turn(text), finish_reason=reason, **more)
        for text, reason in zip(texts, reasons, strict=True)
    ]


# --- Ratings of single answers, one a row, and the rankings that the answers to one prompt make together ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer(Record):
    """A response and a number for it, such as stars; the highest is the best."""

    prompt: Conversation
    response: str
    rating: float
    id: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        response = check_answer(self.response, "response", may_be_empty=True)
        rating = check_score(self.rating, "rating")
        if not math.isfinite(rating):  # the mean of the ratings of a response may not exist
            raise field_error("rating", f"is {rating}", "use a finite number")
        set_checked(self, prompt=check_prompt(self.prompt), response=response, rating=rating)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The same for rows of other projects, whose names of other fields may be similar."""
        needed = {name: required_field(row, name, "add it") for name in ("prompt", "response", "rating")}
        return cls(**needed, id=row.get("id"), category=row.get("category"))


def rank_ratings(answers: Iterable[RatedAnswer]) -> tuple[list[Ranking], int]:
    """One ranking for each prompt with two or more responses, and the number of prompts with one.

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
        means = {text: round(sum(given) / len(given), 9) for text, given in ratings.items()}  # (4.1 + 4.3) / 2 equals 4.2
        order = sorted(means, key=lambda text: -means[text])
        kept = {order[i] for i in evenly_spaced(len(order))}
        responses = tuple(text for text in means if text in kept)
        ranks, first = ranks_from_scores([means[text] for text in responses]), group[0]
        rankings.append(Ranking(prompt=first.prompt, responses=responses, ranks=ranks, id=first.id, category=first.category))
    return rankings, len(by_prompt) - len(rankings)


# ------------------------------------------------------------------------------------------- OpenAssistant's message trees

# Prompter turns with several answers, ranked by volunteers (rank 0 is the best sibling), and replies to each answer.
# Source: the `.trees.jsonl.gz` files of OpenAssistant/oasst1 and oasst2 (Koepf et al. 2023), whose fields are in
# oasst-data/oasst_data/schemas.py of LAION-AI/Open-Assistant. Messages that were deleted or that reviewers refused
# (`review_result` false) are left out with all replies below them.

Node = Mapping[str, Any]
ROLE_NAMES = {"prompter": "user", "assistant": "assistant"}


def is_tree(row: Mapping[str, Any]) -> bool:
    """Whether a row is a tree of messages."""
    return isinstance(row.get("prompt"), Mapping) and "replies" in row["prompt"]


def tree_demonstrations(row: Mapping[str, Any]) -> list[Record]:
    """The conversations in which every answer is the best of its siblings, each assistant turn in exactly one record.

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
            while learned[-1]["role"] == "user":  # a prompter's reply without an answer
                learned = learned[:-1]
            records.append(Demonstration(prompt=prompt, continuation=learned, id=last.get("message_id")))
    return records


def tree_rankings(row: Mapping[str, Any]) -> list[Record]:
    """One ranking for each prompter turn with two or more ranked answers; of more than nine, nine evenly spaced by rank."""
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
    """Best first, the unranked ones last in their given order."""
    return sorted(nodes, key=lambda node: (_rank(node) is None, _rank(node) or 0))


def _best_answer(node: Node) -> Node | None:
    answers = _ordered(_replies(node, "assistant"))
    if not answers or (len(answers) > 1 and _rank(answers[0]) is None):
        return None
    return answers[0]
