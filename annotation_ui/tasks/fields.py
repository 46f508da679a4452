"""Field checks and prompt views shared by tasks."""

import re
from typing import Any

from align.core.errors import UserError
from align.data.conversation import ROLES
from align.data.records import Prompt, Record
from annotation_ui.rendering.markdown import as_messages, messages_html
from annotation_ui.tasks.base import BadInputError, Json, require

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain a lone surrogate; UTF-8 cannot
MAX_TEXT = 200_000  # characters in one text field of an item or an answer
MAX_COMMENT = 2000


def text_field(row: Json, field: str, *, empty: bool = False) -> str:
    """Return a text field of a row. Raise BadInputError for a wrong type, length or encoding."""
    value = row.get(field, "" if empty else None)
    if not isinstance(value, str):
        raise BadInputError(f"{field}: must be text")
    require(len(value) <= MAX_TEXT, f"{field}: longer than {MAX_TEXT} characters")
    require(empty or bool(value.strip()), f"{field}: is empty")
    require(is_unicode(value), f"{field}: not valid Unicode")
    return value


def unix_lines(text: str) -> str:
    """Normalize line ends to `\\n`, as browsers do in text fields."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_unicode(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8."""
    return text.isascii() or not _SURROGATE.search(text)


def comment_field(answer: Json) -> Json:
    """Return the answer's `comment` as a field, if there is one."""
    comment = text_field(answer, "comment", empty=True).strip()
    require(len(comment) <= MAX_COMMENT, f"comment: longer than {MAX_COMMENT} characters")
    return {"comment": comment} if comment else {}


def prompt_field(row: Json) -> Any:
    """Return `prompt` unchanged. Raise BadInputError if training cannot read it."""
    return checked_record(Prompt, {"prompt": row.get("prompt")})["prompt"]


def model_names(row: Json, count: int) -> list[Any]:
    """Return the model of each of `count` responses. A row's `model` is one name for all, a list, or None."""
    model = row.get("model")
    models = model if isinstance(model, list) else [model] * count
    require(len(models) == count, f"model: must name {count} models")
    return models


def response_fields(row: Json) -> list[Json]:
    """Return `prompt`, `response` and, if known, `model` for each response of a row.

    The row has `responses` or one `response`. If it has neither, and its `prompt` or `messages` is a conversation that ends
    with an assistant turn, that turn is the response. `model` is one name, or one per response. It is stored and exported
    but not shown to labelers.
    """
    row = _split_conversation(row)
    prompt = prompt_field(row)
    responses = [row["response"]] if "response" in row else row.get("responses")
    if not isinstance(responses, list) or not responses:
        raise BadInputError("response: must be text (or give `responses`, or `messages` that end with an assistant turn)")
    return [
        {"prompt": prompt, "response": text_field({"response": response}, "response", empty=True)}
        | ({} if model is None else {"model": text_field({"model": model}, "model")})
        for response, model in zip(responses, model_names(row, len(responses)), strict=True)
    ]


def _split_conversation(row: Json) -> Json:
    """Move a final assistant turn to `response`, if the row has no response of its own."""
    if "response" in row or "responses" in row:
        return row
    field = "messages" if "prompt" not in row and "messages" in row else "prompt"
    if not isinstance(row.get(field), list):
        return row
    turns = check_messages(row[field], field)
    if not turns or turns[-1]["role"] != "assistant":
        return row
    require(len(turns) > 1, f"{field}: has only an assistant turn; add the turn before it")
    return {**row, "prompt": turns[:-1], "response": turns[-1]["content"]}


def checked_record(kind: type[Record], row: Json) -> Json:
    """Return the row. Raise BadInputError if training cannot read it as a record of this kind."""
    try:
        kind.from_row(row)
    except UserError as error:
        raise BadInputError(str(error)) from None
    return row


def check_messages(messages: Any, field: str) -> list[dict[str, str]]:
    """Return a conversation with known fields only. Errors name `field`."""
    require(isinstance(messages, list), f"{field}: must be a list of {{role, content}}")
    for number, message in enumerate(messages):
        require(isinstance(message, dict), f"{field}[{number}]: must be {{role, content}}")
        require(message.get("role") in ROLES, f"{field}[{number}].role: must be one of {', '.join(ROLES)}")
        require("content" in message, f"{field}[{number}]: must be {{role, content}}")
        text_field(message, "content", empty=True)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def excerpt(prompt: Any) -> str:
    """Return the beginning of a prompt, or of a conversation's last turn."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    return text if len(text) <= 120 else f"{text[:117]}..."


def prompt_view(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt as messages with rendered content."""
    return messages_html(as_messages(prompt))
