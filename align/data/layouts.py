"""Pairs in TRL's form, transcripts as in HH-RLHF, and rows of `align sample`.

A function `..._prompt` returns the fields of a `Prompt`; the others return records.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from align.data.conversation import (
    Conversation,
    Message,
    check_answer,
    check_continuation,
    check_conversation,
    check_prompt,
)
from align.data.fields import (
    check_scores,
    check_text,
    check_texts,
    field_error,
    id_or_none,
    required_field,
    text_or_none,
)
from align.data.records import Demonstration, Ranking, Record

Row = Mapping[str, Any]


def id_and_category(row: Row) -> dict[str, Any]:
    """Both, if the row has them in a usable form."""
    return {"id": id_or_none(row.get("id")), "category": text_or_none(row.get("category"))}


def pair_ranking(row: Row, prompt: object, chosen: object, rejected: object, *, may_be_empty: bool = False) -> list[Record]:
    """A ranking of two responses, a tie if their scores are equal."""
    given = {"chosen": chosen, "rejected": rejected}
    texts = tuple(check_answer(answer, name, may_be_empty=may_be_empty) for name, answer in given.items())
    if texts[0] == texts[1]:
        raise field_error("rejected", "is the same text as 'chosen'", "remove the row")
    return [
        Ranking(
            prompt=check_prompt(prompt),
            responses=texts,
            ranks=(1, 1) if check_scores(row) else (1, 2),
            margin=row.get("margin"),
            labeler=row.get("labeler"),
            **id_and_category(row),
        )
    ]


# --- TRL's preference form: prompt, chosen, rejected ---


def pair(row: Row) -> list[Record]:
    """Text or turns; turns of the whole conversation, as in TRL's implicit prompt or UltraFeedback, are split."""
    chosen = required_field(row, "chosen", "a pair has prompt, chosen and rejected")
    rejected = required_field(row, "rejected", "a pair has prompt, chosen and rejected")
    if is_whole_conversation(chosen) or is_whole_conversation(rejected):
        prompt, answers = _split_off_answers(check_conversation(chosen, "chosen"), check_conversation(rejected, "rejected"))
        return pair_ranking(row, prompt, *answers)
    prompt = required_field(row, "prompt", "write the text that both responses answer")
    # as the labeling app exports them: a policy's answer may be empty, and somebody has judged it
    return pair_ranking(row, prompt, chosen, rejected, may_be_empty=True)


def is_whole_conversation(turns: object) -> bool:
    """Whether a list of turns begins with the prompt, and not with the answer to it."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def is_whole_pair(row: Row) -> bool:
    return is_whole_conversation(row.get("chosen"))


def _split_off_answers(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, tuple[str, str]]:
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1]["role"] != "assistant":
            raise field_error(field, "ends with a user turn", "end it with the response")
    if chosen[:-1] != rejected[:-1]:
        wrong = "differs from 'chosen' before its last turn"
        raise field_error("rejected", wrong, "give both the same prompt, or remove the row")
    return chosen[:-1], (chosen[-1]["content"], rejected[-1]["content"])


def pair_prompt(row: Row) -> dict[str, Any]:
    """The prompt of a pair of whole conversations: the turns of `chosen` before the last."""
    turns = check_conversation(required_field(row, "chosen", "a pair has prompt, chosen and rejected"), "chosen")
    return {"prompt": turns[:-1], **id_and_category(row)}


# --- Transcripts, as in HH-RLHF (Bai et al. 2022): "\\n\\nHuman: ...\\n\\nAssistant: ..." ---

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
"""A name that begins a turn: at the beginning of the text, or after a blank line. Elsewhere it is part of a message."""


def _transcript_turns(text: str) -> list[Message] | None:
    """The turns of a text that begins with a speaker's name, stripped of white space; None for any other text."""
    before, *parts = _SPEAKER.split(text)
    if before or not parts:
        return None
    return [
        {"role": SPEAKERS[name], "content": content.strip()} for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _joined(turns: Sequence[Message]) -> Conversation:
    """Join turns of one speaker in a row (a model that wrote "Assistant:" again): roles have to alternate."""
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"]:
            text = f"{joined.pop()['content']}\n\n{turn['content']}".strip()
            turn = {"role": turn["role"], "content": text}
        joined.append(turn)
    return tuple(joined)


def parse_transcript(text: object, field: str) -> Conversation:
    """The turns of a transcript; the last may be empty."""
    turns = _transcript_turns(check_text(text, field))
    if turns is None:
        wrong = "is neither a transcript that begins with 'Human:' nor an answer to a 'prompt'"
        raise field_error(field, wrong, "add the field prompt")
    return _joined(turns)


_HELPSTEER_SPEAKER = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
"""What separates the turns of a prompt in HelpSteer and HelpSteer 2; the first turn is the user's."""


def with_parsed_prompt(row: Row) -> Row:
    """The row, with `prompt` parsed if it is a transcript that waits for the assistant, as in Dahoas/rm-static.

    It begins with the user's name and ends with the assistant's name or with a user's turn, or its turns are separated as in
    HelpSteer 2. Any other text is one message.
    """
    prompt = row.get("prompt")
    first, *rest = _HELPSTEER_SPEAKER.split(prompt) if isinstance(prompt, str) else ("",)
    if rest:
        roles = {"User": "user", "Assistant": "assistant"}
        later = [{"role": roles[name], "content": text} for name, text in zip(rest[::2], rest[1::2], strict=True)]
        return {**row, "prompt": [{"role": "user", "content": first}, *later]}
    turns = _transcript_turns(prompt) if isinstance(prompt, str) else None
    if turns is None or turns[0]["role"] != "user":
        return row
    joined = _joined(turns)
    if turns[-1] == {"role": "assistant", "content": ""}:
        return {**row, "prompt": joined if joined[-1]["content"] else joined[:-1]}
    waits = joined[-1]["role"] == "user" and (len(joined) > 1 or str(prompt).startswith("\n\n"))
    return {**row, "prompt": joined} if waits else row


def hh_pair(row: Row) -> list[Record]:
    """Two transcripts that differ in the assistant's last turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    chosen = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    rejected = parse_transcript(required_field(row, "rejected", "write the transcript"), "rejected")
    prompt, answers = _split_off_answers(chosen, rejected)
    return pair_ranking(row, prompt, *answers)


def hh_prompt(row: Row) -> dict[str, Any]:
    """The turns before the assistant's last one in `chosen`."""
    turns = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    return {"prompt": turns[:-1] if turns[-1]["role"] == "assistant" else turns, **id_and_category(row)}


# --- Rows of `align sample` ---


def sampled_demonstrations(row: Row) -> list[Record]:
    """A demonstration for each response of a row of `align sample`, such as the best of n answers."""
    prompt, more = check_prompt(row["prompt"]), id_and_category(row)
    texts = check_texts(row["responses"], "responses")
    return [Demonstration(prompt=prompt, continuation=check_continuation(text, "responses"), **more) for text in texts]
