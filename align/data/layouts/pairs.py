"""Pairs of a better and a worse response: TRL's preference form and HH-RLHF's transcripts."""

from collections.abc import Mapping
from typing import Any

from align.data.conversation import Conversation, check_answer, check_conversation, check_prompt
from align.data.fields import field_error, id_or_none, required_field, text_or_none
from align.data.layouts.transcripts import parse_transcript
from align.data.records import Prompt, Ranking, Record

Row = Mapping[str, Any]


def make_pair_ranking(
    row: Row,
    prompt: object,
    chosen: object,
    rejected: object,
    names: tuple[str, str],
    *,
    may_be_empty: bool = False,
) -> list[Record]:
    """A ranking of two responses.

    Args:
        row: for margin, labeler, id and category.
        prompt: text or turns.
        chosen: the better response.
        rejected: the worse one.
        names: the fields of the two responses, for messages.
        may_be_empty: accept a response without text.

    Raises:
        UserError: if the two are the same, or anything is bad.
    """
    given = zip((chosen, rejected), names, strict=True)
    texts = tuple(check_answer(answer, name, may_be_empty=may_be_empty) for answer, name in given)
    if texts[0] == texts[1]:
        raise field_error(names[1], f"is the same text as '{names[0]}'", "remove the row")
    return [
        Ranking(
            prompt=check_prompt(prompt),
            responses=texts,
            ranks=(1, 2),
            margin=row.get("margin"),
            labeler=row.get("labeler"),
            id=id_or_none(row.get("id")),
            category=text_or_none(row.get("category")),
        )
    ]


# --- TRL's preference form: prompt, chosen, rejected ---


def pair(row: Row) -> list[Record]:
    """Text or turns; turns of the whole conversation, as in TRL's implicit prompt or UltraFeedback, are split.

    Raises:
        UserError: if a field is missing or the two responses have equal scores.
    """
    chosen = required_field(row, "chosen", "a pair has prompt, chosen and rejected")
    rejected = required_field(row, "rejected", "a pair has prompt, chosen and rejected")
    if is_whole_conversation(chosen) or is_whole_conversation(rejected):
        prompt, answers = _split_off_answers(check_conversation(chosen, "chosen"), check_conversation(rejected, "rejected"))
        return make_pair_ranking(row, prompt, answers[0], answers[1], ("chosen", "rejected"))
    prompt = required_field(row, "prompt", "write the text that both responses answer")
    # as the labeling app exports them: a policy's answer may be empty, and somebody has judged it
    return make_pair_ranking(row, prompt, chosen, rejected, ("chosen", "rejected"), may_be_empty=True)


def is_whole_conversation(turns: object) -> bool:
    """Whether a list of turns begins with the prompt, and not with the answer to it."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _split_off_answers(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, tuple[str, str]]:
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1]["role"] != "assistant":
            raise field_error(field, "ends with a user turn", "end it with the response")
    if chosen[:-1] != rejected[:-1]:
        wrong = "differs from 'chosen' before its last turn"
        raise field_error("rejected", wrong, "give both the same prompt, or remove the row")
    return chosen[:-1], (chosen[-1]["content"], rejected[-1]["content"])


def pair_prompt(row: Row) -> list[Record]:
    """The prompt of a pair of whole conversations: the turns of `chosen` before the last."""
    turns = check_conversation(required_field(row, "chosen", "a pair has prompt, chosen and rejected"), "chosen")
    return [Prompt(prompt=turns[:-1], id=id_or_none(row.get("id")), category=text_or_none(row.get("category")))]


# --- Pairs of whole transcripts, as in HH-RLHF (Bai et al. 2022) ---


def hh_pair(row: Row) -> list[Record]:
    """Two transcripts that differ in the assistant's last turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    chosen = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    rejected = parse_transcript(required_field(row, "rejected", "write the transcript"), "rejected")
    prompt, answers = _split_off_answers(chosen, rejected)
    return make_pair_ranking(row, prompt, answers[0], answers[1], ("chosen", "rejected"))


def hh_prompt(row: Row) -> list[Record]:
    """What comes before the assistant's last turn in `chosen`."""
    turns = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    prompt = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    return [Prompt(prompt=prompt, id=id_or_none(row.get("id")), category=text_or_none(row.get("category")))]
