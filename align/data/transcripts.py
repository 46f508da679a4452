"""Transcripts: conversations as one text, in which each turn begins with its speaker's name.

HH-RLHF (Bai et al. 2022) puts a blank line before each name: "\\n\\nHuman: ...\\n\\nAssistant: ...". DeepSpeed-Chat
(`raw_datasets.py` of DeepSpeedExamples) puts a space: " Human: ... Assistant:". Others put one line break, or name the
speakers User, prompter or AI.
"""

import re
from collections.abc import Mapping
from typing import Any

from align.data.conversation import Conversation, Message
from align.data.fields import check_text, field_error

Row = Mapping[str, Any]
Turns = list[tuple[str, str]]
USERS, ASSISTANTS = ("human", "user", "prompter"), ("assistant", "ai")
OPENING = re.compile(rf"(\s*)((?:### ?)?)({'|'.join(USERS + ASSISTANTS)}):", re.IGNORECASE)
BLANK_LINE, LINE, SPACE = r"\r?\n\r?\n", r"\r?\n", r"\s"


def _split(text: str) -> tuple[Turns, str] | None:
    """The turns of a text that begins with a speaker's name, and what separates them; None for any other text.

    The first name decides how names are written, and the white space before the first assistant's name decides what a
    turn begins after. A name elsewhere is part of a message.
    """
    opening = OPENING.match(text)
    if opening is None:
        return None
    space, prefix, first = opening.groups()
    cased = str.lower if first.islower() else str.upper if first.isupper() and first != "AI" else _title
    users = [first] if first.lower() in USERS else [cased(name) for name in USERS]
    assistants = [cased(name) for name in ASSISTANTS if re.search(rf"{prefix}{cased(name)}:", text)][:1]
    if first not in {cased(name) for name in USERS + ASSISTANTS}:
        return None
    separator = _separator(text, space, rf"{prefix}(?:{'|'.join(assistants) or '(?!)'}):")
    between = r"\s*" if separator == SPACE and prefix else separator  # "### Human: Hi### Assistant: Hello"
    _, *parts = re.split(rf"(?:^\s*|{between}){prefix}({'|'.join(users + assistants)}):", text)
    turns = [
        ("user" if name in users else "assistant", content.strip())
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if separator == SPACE and any(a[0] == b[0] for a, b in zip(turns, turns[1:], strict=False)):
        turns = _outer_turns(text[opening.end() :], turns, assistants, prefix)
    return turns, separator


def _title(name: str) -> str:
    return "AI" if name == "ai" else name.title()


def _separator(text: str, space: str, assistant: str) -> str:
    if re.fullmatch(BLANK_LINE, space):
        return BLANK_LINE
    found = re.search(rf"(\s*\n)\s*{assistant}", text)
    if found is None:
        return SPACE
    return BLANK_LINE if found[1].count("\n") > 1 else LINE


def _outer_turns(text: str, turns: Turns, assistants: list[str], prefix: str) -> Turns:
    """Names within a line that do not alternate are part of the message: only the last assistant's begins a turn."""
    names = list(re.finditer(rf"\s+{prefix}(?:{'|'.join(assistants)}):", text)) if assistants else []
    if turns[0][0] != "user" or not names:
        return [(turns[0][0], text.strip())]
    return [("user", text[: names[-1].start()].strip()), ("assistant", text[names[-1].end() :].strip())]


def parse_transcript(text: object, field: str) -> Conversation:
    """The turns of a transcript, stripped of white space; the last may be empty.

    Turns of one speaker in a row (a model that wrote "Assistant:" again) are joined: roles have to alternate.
    """
    found = _split(check_text(text, field))
    if found is None:
        wrong = "is neither a transcript that begins with 'Human:' nor an answer to a 'prompt'"
        raise field_error(field, wrong, "add the field prompt")
    return _joined(found[0])


def _joined(turns: Turns) -> Conversation:
    joined: list[Message] = []
    for role, content in turns:
        if joined and joined[-1]["role"] == role:
            joined[-1] = {"role": role, "content": f"{joined[-1]['content']}\n\n{content}".strip()}
        else:
            joined.append({"role": role, "content": content})
    return tuple(joined)


def parse_prompt_transcript(row: Row) -> Row:
    """The row, with `prompt` parsed if it is a transcript that waits for the assistant, as in Dahoas/rm-static.

    It begins with the user's name and ends with the assistant's. It may also end with a user's turn if names begin lines.
    Any other text that holds a speaker's name is one message.
    """
    prompt = row.get("prompt")
    found = _split(prompt) if isinstance(prompt, str) else None
    if found is None:
        return row
    turns, separator = _joined(found[0]), found[1]
    last = turns[-1]
    if turns[0]["role"] != "user":
        return row
    if found[0][-1] == ("assistant", ""):
        return {**row, "prompt": turns if last["content"] else turns[:-1]}
    waits = last["role"] == "user" and (len(turns) > 1 or str(prompt).startswith("\n\n"))
    return {**row, "prompt": turns} if waits and separator in (BLANK_LINE, LINE) else row
