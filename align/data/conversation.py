"""Conversations: turns, the allowed orders of turns, the form in a file; sentences of a text."""

import re
from collections.abc import Mapping
from typing import Any, TypedDict

from align.data.fields import check_list, check_text, check_turn, field_error, short_repr
from align.data.transcripts import prompt_turns

ROLES = ("system", "user", "assistant")
TEXT_PARTS = ("text", "input_text", "output_text")
ANSWERS = ("completion", "chosen", "rejected")
"""Fields of a row that hold an answer as text or as a list of turns."""
_TURNS_AS_TEXT = re.compile(
    r"""(?s)\s*\[\s*\{\s*(?=['"](role|content|from|value)['"]\s*:)(?=.*['"](content|value)['"]\s*:)"""
    r"""(.*,\s*)?['"](role|from)['"]\s*:\s*['"](system|user|assistant|human|gpt)['"]"""
)


class Message(TypedDict):
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def user_turn(text: str) -> Conversation:
    """Return a conversation of one user turn, the equivalent of a plain-text prompt."""
    return ({"role": "user", "content": text},)


def assistant_turn(text: str) -> Conversation:
    """Return a conversation of one assistant turn, the equivalent of a plain-text answer."""
    return ({"role": "assistant", "content": text},)


def check_conversation(value: object, field: str) -> Conversation:
    """Check turns: known roles, a system turn only at the start, user and assistant in alternation.

    The chat templates of several models (Llama 2, Mistral, Gemma) reject anything else, and would do so only during
    training. An empty system turn is allowed: some templates then omit their default one.
    """
    turns = tuple(_check_message(entry, f"{field}[{i}]") for i, entry in enumerate(check_list(value, field)))
    if not turns:
        raise field_error(field, "has no turns", "add at least one {role, content}")
    for i, (before, turn) in enumerate(zip((None, *turns), turns, strict=False)):
        if turn["role"] == "system" and before is not None:
            raise field_error(
                f"{field}[{i}]", "is a system turn after another turn", "move the system turn to the beginning"
            )
        if before is not None and before["role"] == turn["role"]:
            raise field_error(f"{field}[{i}]", f"is a second consecutive {turn['role']} turn", "merge the two turns")
    return turns


def _check_message(value: object, field: str) -> Message:
    if not isinstance(value, Mapping):
        raise field_error(field, f"is {short_repr(value)}, not a turn", "use {role, content}")
    role = value.get("role")
    role = "system" if role == "developer" else role  # used by newer OpenAI models
    if role not in ROLES:
        raise field_error(f"{field}.role", f"is {short_repr(role)}", "use system, user or assistant")
    check_turn(value, field)
    content = _joined_parts(value.get("content"), f"{field}.content")
    content = check_text(content, f"{field}.content", may_be_empty=role == "system")
    return {"role": role, "content": content}


def _joined_parts(content: object, field: str) -> object:
    """Join the content of a turn if it is a list of text parts, as in OpenAI's API and transformers."""
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise field_error(f"{field}[{i}]", f"is {short_repr(kind)}, but only text is supported", "remove the row")
        texts.append(check_text(part.get("text"), f"{field}[{i}].text", may_be_empty=True))
    return "".join(texts)


def _spells_turns(text: str) -> bool:
    return text.rstrip().endswith("]") and _TURNS_AS_TEXT.match(text) is not None


def _check_plain(value: str, field: str, *, may_be_empty: bool = False) -> str:
    """Check that text is not a list of turns that `str` or pandas has converted to a string."""
    if _spells_turns(value):
        raise field_error(field, "is a string that contains a list of turns", "write the list as JSON, with double quotes")
    return check_text(value, field, may_be_empty=may_be_empty)


def check_prompt(value: object, field: str = "prompt") -> Conversation:
    """Return a conversation that ends with a user turn. Plain text becomes one user turn."""
    if isinstance(value, str):
        return user_turn(_check_plain(value, field))
    turns = _turns(value, field)
    if turns[-1]["role"] == "system":
        raise field_error(field, "has only a system turn", "add the user's turn")
    if turns[-1]["role"] != "user":
        raise field_error(field, "ends with an assistant turn", "end it with a user turn")
    return turns


def check_continuation(value: object, field: str) -> Conversation:
    """Return the turns to train on: the first and last are the assistant's. Plain text is one assistant turn."""
    if isinstance(value, str):
        return assistant_turn(_check_plain(value, field))
    turns = _turns(value, field)
    if turns[0]["role"] != "assistant":
        raise field_error(field, f"begins with a {turns[0]['role']} turn", "move the turns before the answer to prompt")
    if turns[-1]["role"] != "assistant":
        raise field_error(field, "ends with a user turn", "remove it")
    return turns


def _turns(value: object, field: str) -> Conversation:
    if not isinstance(value, list | tuple):
        raise field_error(field, f"must be a string or a list of turns, not {short_repr(value)}", "quote it")
    return check_conversation(value, field)


def check_answer(value: object, field: str, *, may_be_empty: bool = False) -> str:
    """Return the text of a response, given as text or as a list of one assistant turn."""
    if isinstance(value, str):
        return _check_plain(value, field, may_be_empty=may_be_empty)
    turns = check_continuation(value, field)
    if len(turns) > 1:
        raise field_error(field, f"has {len(turns)} turns", "keep one assistant turn and move the earlier ones to prompt")
    return turns[0]["content"]


def as_paragraphs(conversation: Conversation) -> str:
    """Format the turns as paragraphs of `role: text`, for a judge."""
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in conversation)


def to_json(conversation: Conversation) -> Any:
    """Convert to the file format: text for a single user turn, otherwise a list of {role, content}.

    Text that would be parsed as several turns, such as a transcript, becomes a list of one turn.
    """
    if len(conversation) == 1 and conversation[0]["role"] == "user":
        text = conversation[0]["content"]
        if prompt_turns(text) is None and not _spells_turns(text):
            return text
    return [dict(turn) for turn in conversation]


def answer_to_json(text: str) -> Any:
    """Convert an answer to the file format: text, or a list of one turn if the text looks like a list of turns."""
    return [dict(turn) for turn in assistant_turn(text)] if _spells_turns(text) else text


def unambiguous(row: Mapping[str, Any]) -> dict[str, Any]:
    """Make a row's text unambiguous: `prompt` and answers that would be parsed as turns become lists of one turn."""
    forms = {"prompt": lambda text: to_json(user_turn(text)), **dict.fromkeys(ANSWERS, answer_to_json)}
    return {name: forms[name](value) if name in forms and isinstance(value, str) else value for name, value in row.items()}


# ---------------------------- sentences: the segments that fine-grained rewards belong to (Wu et al. 2023, arXiv 2306.01693)

_CLOSING = r"""["'”’»)\]*_」』）]*+"""
# End of a sentence: punctuation followed by a space, punctuation of a script without spaces, a newline, or the end.
_BOUNDARY = re.compile(rf"(?<![.!?…؟۔])[.!?…؟۔]++{_CLOSING}(?=\s)|(?<![。！？｡])[。！？｡]++{_CLOSING}|\n|\Z")


def segment_ends(text: str) -> list[int]:
    """Return the end offset of each sentence or line, in code points. A blank line belongs to the next sentence.

    The text before an offset ends without whitespace. The last offset is the end of the text without trailing whitespace.
    """
    ends, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        part = text[start : boundary.end()]
        if part.strip():
            ends.append(start + len(part.rstrip()))
        start = boundary.end()
    return ends
