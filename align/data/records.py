"""Record types of training data and labeling exports: frozen dataclasses without torch.

A record checks its values when it is made: a bad value raises a `UserError` that names the field, and no stage checks again.
`from_row` makes a record from a row of a file in this project's layout (docs/data.md), and `to_row` is its inverse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from align.data.conversation import (
    Conversation,
    Message,
    answer_to_json,
    check_continuation,
    check_conversation,
    check_prompt,
    to_json,
)
from align.data.fields import (
    as_lists,
    attended_ids,
    check_attributes,
    check_flags,
    check_id,
    check_margin,
    check_optional_bool,
    check_optional_text,
    check_preferences,
    check_row,
    check_spelling,
    check_text,
    check_texts,
    check_token_ids,
    check_whole_numbers,
    field_error,
    is_cut,
    learned_turns,
    required_field,
    short_repr,
    without_none,
)

__all__ = ["AttributeJudgment", "Conversation", "Demonstration", "Message", "Prompt", "Ranking", "Record", "RuleJudgment"]

VERDICTS = ("violates", "unsure", "follows")
MIN_RESPONSES, MAX_RESPONSES = 2, 9  # InstructGPT: 4 to 9
RATINGS = (1, 7)  # Likert scale of overall quality (InstructGPT, Table 3)
FLAGS = {
    "fails_instruction": "Fails to follow the instruction or task",
    "unfit_for_assistant": "Unfit for a customer assistant",
    "hallucination": "Hallucination",
    "breaks_constraint": "Breaks a constraint stated in the prompt",
    "sexual": "Sexual content",
    "violent": "Violent content",
    "encourages_harm": "Encourages or fails to discourage harm",
    "denigrates_protected_class": "Denigrates a protected class",
    "harmful_advice": "Gives harmful advice",
    "expresses_opinion": "Expresses an opinion",
    "moral_judgment": "Expresses a moral judgment",
}
"""Binary labels of a response (InstructGPT, Table 3): name in files, and text in the labeling app."""


def set_checked(record: "Record", **values: object) -> None:
    """Set the validated fields of a frozen record, and validate its id and category."""
    known = {"id": check_id(record.id), "category": check_optional_text(record.category, "category")}
    for name, value in (values | known).items():
        object.__setattr__(record, name, value)


class Record:
    """Base class of all record types.

    Attributes:
        prompt: the conversation to answer; ends with a user turn.
        id: the row's id, if it has one.
        category: its category, if it has one.
    """

    __slots__ = ()
    prompt: Conversation
    id: str | None
    category: str | None

    needed: ClassVar[Mapping[str, str]] = {}
    """Required fields, with the remedy if one is missing."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Parse a row in the native layout. Unknown fields are ignored, misspelled ones rejected."""
        row, names = check_row(row), [field.name for field in fields(cls)]  # type: ignore[arg-type]
        check_spelling(row, names)
        values = {name: required_field(row, name, remedy) for name, remedy in cls.needed.items()}
        return cls(**{name: row.get(name) for name in names} | values)

    def to_row(self) -> dict[str, Any]:
        """Convert to a row, without missing fields."""
        row = {f.name: as_lists(getattr(self, f.name)) for f in fields(self) if f.compare}  # type: ignore[arg-type]
        return without_none({**row, "prompt": to_json(self.prompt)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Record):
    """A prompt with an answer to imitate.

    Attributes:
        prompt: every turn before the first one to learn from.
        continuation: starts and ends with an assistant turn. Every assistant turn in it is trained on.
        finish_reason: finish reason of the last turn, see `is_cut`. None if the turn is complete.
    """

    prompt: Conversation
    continuation: Conversation
    finish_reason: str | None = None
    id: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        continuation = check_continuation(self.continuation, "continuation")
        finish_reason = check_optional_text(self.finish_reason, "finish_reason")
        set_checked(self, prompt=check_prompt(self.prompt), continuation=continuation, finish_reason=finish_reason)

    @property
    def cut_responses(self) -> int:
        """1 if the last turn was truncated by a token limit, else 0."""
        return int(is_cut(self.finish_reason))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Parse `prompt` and `completion` (loss on the completion), or `messages` (loss on every assistant turn)."""
        records = cls.all_from_row(row)
        if len(records) > 1:
            raise field_error("messages", "masks turns between trained ones", "read the row with all_from_row")
        return records[0]

    @classmethod
    def all_from_row(cls, row: Mapping[str, Any]) -> list[Self]:
        """Return records that train on each assistant turn once, except turns with `weight` 0 or `train` false.

        A record holds adjacent learned turns. Excluded turns before them are part of its prompt.
        """
        row = check_row(row)
        field = "messages" if row.get("completion") is None else "completion"
        if field == "completion":
            prompt = check_prompt(required_field(row, "prompt", "add the prompt of the completion"))
            continuation = check_continuation(row["completion"], "completion")
        else:
            messages = required_field(row, "messages", "use messages, or prompt and completion")
            prompt, continuation = _split_messages(check_conversation(messages, "messages"))
        turns = [{"role": "assistant"}] if isinstance(row[field], str) else row[field]
        learned = learned_turns(turns, field)[len(turns) - len(continuation) :]
        if not any(learned):
            raise field_error(field, "masks all turns from the loss", "remove the row")
        ends = [i for i in range(0, len(learned), 2) if learned[i] and not any(learned[i + 2 : i + 3])]
        starts = [i for i in range(0, len(learned), 2) if learned[i] and not (i and learned[i - 2])]
        known = {"id": row.get("id"), "category": row.get("category")}
        reason, last = row.get("finish_reason"), len(continuation) - 1
        return [
            cls(
                prompt=(*prompt, *continuation[:start]),
                continuation=continuation[start : end + 1],
                finish_reason=reason if end == last else None,
                **known,
            )
            for start, end in zip(starts, ends, strict=True)
        ]

    def to_row(self) -> dict[str, Any]:
        """Return `prompt` and `completion`, or `messages` if several assistant turns are trained on."""
        if len(self.continuation) == 1:
            answer = answer_to_json(self.continuation[0]["content"])
            turns = {"prompt": to_json(self.prompt), "completion": answer}
        elif any(turn["role"] == "assistant" for turn in self.prompt):
            turns = {"prompt": to_json(self.prompt), "completion": to_json(self.continuation)}
        else:
            turns = {"messages": [dict(turn) for turn in self.prompt + self.continuation]}
        return without_none({**turns, "finish_reason": self.finish_reason, "id": self.id, "category": self.category})


def _split_messages(messages: Conversation) -> tuple[Conversation, Conversation]:
    roles = [turn["role"] for turn in messages]
    if "assistant" not in roles:
        raise field_error("messages", "has no assistant turn", "add one")
    if roles[-1] != "assistant":
        raise field_error("messages", "ends with a user turn", "remove it")
    first = roles.index("assistant")
    if "user" not in roles[:first]:
        raise field_error("messages", "has no user turn before the first assistant turn", "add one")
    return messages[:first], messages[first:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(Record):
    """K ranked responses to one prompt. A pair is a ranking of two.

    K and the ratings follow Ouyang et al. 2022 (InstructGPT), section 3.4 and appendix B.

    Attributes:
        responses: text of each response [K], K from 2 to 9. May be empty, as policies write it.
        ranks: [K], 1 for the best, equal for a tie; any integers from 1, stored as 1..m without gaps. Equal responses must
            have equal ranks.
        margin: preference strength of a pair, finite and 0 or more; pairs only.
        labeler: name or id of the labeler.
        ratings: quality of each response [K], from 1 to 7.
        preferences: probability that response i is better than response j [K, K], if labelers disagree or may be wrong.
            1 minus the entries (i, j) and (j, i) is the probability of a tie.
        flags: names for the ranking, or a tuple of names for each response.
        model: model that wrote each response [K].
        finish_reason: finish reason of each response [K], see `is_cut`. None if all are complete.
        overruled: true if a lead's decision on the same item replaces the ranking. Training leaves it out.
    """

    prompt: Conversation
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    margin: float | None = None
    labeler: str | None = None
    ratings: tuple[int, ...] | None = None
    preferences: tuple[tuple[float, ...], ...] | None = None
    flags: tuple[str, ...] | tuple[tuple[str, ...], ...] | None = None
    model: tuple[str, ...] | None = None
    finish_reason: tuple[str, ...] | None = None
    overruled: bool | None = None
    id: str | None = None
    category: str | None = None
    needed: ClassVar = {
        "prompt": "add the prompt of the responses",
        "responses": "list the compared responses",
        "ranks": "add one rank per response, 1 for the best",
    }

    def __post_init__(self) -> None:
        prompt = check_prompt(self.prompt)
        responses = check_texts(self.responses, "responses", may_be_empty=True)
        count = len(responses)
        if not MIN_RESPONSES <= count <= MAX_RESPONSES:
            raise field_error("responses", f"is a list of {count}", f"use {MIN_RESPONSES} to {MAX_RESPONSES} responses")
        if self.margin is not None and count != 2:
            raise field_error("margin", f"is set for {count} responses", "remove it: only pairs have a margin")
        set_checked(
            self,
            prompt=prompt,
            responses=responses,
            ranks=_check_ranks(self.ranks, responses),
            margin=None if self.margin is None else check_margin(self.margin),
            labeler=check_optional_text(self.labeler, "labeler"),
            ratings=None if self.ratings is None else check_whole_numbers(self.ratings, "ratings", count, *RATINGS),
            preferences=None if self.preferences is None else check_preferences(self.preferences, count),
            flags=None if self.flags is None else check_flags(self.flags, count),
            model=None if self.model is None else check_texts(self.model, "model", count),
            finish_reason=None if self.finish_reason is None else check_texts(self.finish_reason, "finish_reason", count),
            overruled=check_optional_bool(self.overruled, "overruled"),
        )

    @property
    def is_complete(self) -> tuple[bool, ...]:
        """[K]: whether each response is complete, not truncated."""
        return tuple(not is_cut(reason) for reason in self.finish_reason or [None] * len(self.responses))

    @property
    def cut_responses(self) -> int:
        """Number of truncated responses."""
        return self.is_complete.count(False)

    @property
    def all_tied(self) -> bool:
        """Whether all responses are tied, so that the ranking does not contribute to a loss."""
        return len(set(self.ranks)) == 1


def _check_ranks(value: object, responses: tuple[str, ...]) -> tuple[int, ...]:
    ranks = check_whole_numbers(value, "ranks", len(responses), 1, None)
    levels = sorted(set(ranks))
    rank_of: dict[str, int] = {}
    for response, rank in zip(responses, ranks, strict=True):
        if rank_of.setdefault(response, rank) != rank:
            wrong = f"has ranks {rank_of[response]} and {rank} for the same response {short_repr(response)}"
            raise field_error("ranks", wrong, "give both the same rank or remove one")
    return tuple(levels.index(rank) + 1 for rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Record):
    """A conversation to respond to, for PPO and sampling.

    Attributes:
        prompt: ends with a user turn; may be empty if the prompt is given as token ids.
        ids: token ids to use instead of the text. If None, the text is tokenized.
        columns: other columns of the row, for reward functions.
    """

    prompt: Conversation = ()
    ids: tuple[int, ...] | None = None
    id: str | None = None
    category: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.ids is None or self.prompt:
            set_checked(self, prompt=check_prompt(self.prompt))
        if self.ids is not None:
            set_checked(self, ids=check_token_ids(self.ids, "input_ids"))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Parse `prompt`, `input_ids` or both, with optional `id` and `category`. Other fields are ignored."""
        row = check_row(row)
        optional: dict[str, Any] = {name: row.get(name) for name in ("id", "category")}
        if row.get("input_ids") is not None:
            optional["ids"] = attended_ids(row["input_ids"], row.get("attention_mask"))
            return cls(prompt=row.get("prompt") or (), **optional)
        return cls(prompt=required_field(row, "prompt", "add the prompt"), **optional)

    def to_row(self) -> dict[str, Any]:
        row = Record.to_row(self)
        if (ids := row.pop("ids", None)) is None:
            return row
        return {"input_ids": ids} | {name: value for name, value in row.items() if name != "prompt" or self.prompt}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleJudgment(Record):
    """Whether a response violates a rule, as in Sparrow (Glaese et al. 2022).

    Attributes:
        response: its text; may be empty, as policies write it.
        rule: the rule's id in forms/rules.
        verdict: violates, unsure or follows.
        labeler: name or id of the labeler.
        decision: whether a lead made the judgment. It counts instead of the labelers' verdicts.
        overruled: true if a lead's decision replaces it. Training leaves it out.
        note: the labeler's comment; may be empty.
        model: model that wrote the response, if known.
    """

    prompt: Conversation
    response: str
    rule: str
    verdict: str
    labeler: str | None = None
    decision: bool | None = None
    overruled: bool | None = None
    note: str | None = None
    model: str | None = None
    id: str | None = None
    category: str | None = None
    needed: ClassVar = dict.fromkeys(("prompt", "response", "rule", "verdict"), "add it")

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise field_error("verdict", f"is {short_repr(self.verdict)}", f"use one of {', '.join(VERDICTS)}")
        set_checked(
            self,
            prompt=check_prompt(self.prompt),
            response=check_text(self.response, "response", may_be_empty=True),
            rule=check_text(self.rule, "rule"),
            decision=check_optional_bool(self.decision, "decision"),
            overruled=check_optional_bool(self.overruled, "overruled"),
            labeler=check_optional_text(self.labeler, "labeler"),
            note=None if self.note is None else check_text(self.note, "note", may_be_empty=True),
            model=check_optional_text(self.model, "model"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeJudgment(Record):
    """One labeler's attribute ratings of a response.

    As LaMDA's labels (Thoppilan et al. 2022, section 4): sensible, specific, interesting, unsafe.

    Attributes:
        response: its text; may be empty, as policies write it.
        attributes: finite numbers by name: 0 or 1 for a yes/no attribute, 1 to 7 for a rating.
        labeler: name or id of the labeler.
        overruled: true if a lead's decision replaces it. Training leaves it out.
    """

    prompt: Conversation
    response: str
    attributes: Mapping[str, float] = field(hash=False)
    labeler: str | None = None
    overruled: bool | None = None
    id: str | None = None
    category: str | None = None
    needed: ClassVar = dict.fromkeys(("prompt", "response", "attributes"), "add it")

    def __post_init__(self) -> None:
        set_checked(
            self,
            prompt=check_prompt(self.prompt),
            response=check_text(self.response, "response", may_be_empty=True),
            attributes=check_attributes(self.attributes),
            labeler=check_optional_text(self.labeler, "labeler"),
            overruled=check_optional_bool(self.overruled, "overruled"),
        )


def ranks_from_scores(scores: Sequence[float]) -> tuple[int, ...]:
    """Return the dense ranks [K] of scores [K]: the highest score has rank 1, equal scores share a rank."""
    levels = sorted(set(scores), reverse=True)
    return tuple(levels.index(score) + 1 for score in scores)


def evenly_spaced(count: int) -> list[int]:
    """Return at most `MAX_RESPONSES` evenly spaced indices of `count` items, including the first and the last."""
    if count <= MAX_RESPONSES:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_RESPONSES - 1)) for i in range(MAX_RESPONSES)]
