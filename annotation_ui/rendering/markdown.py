"""Renders untrusted Markdown, such as prompts and responses, as safe HTML.

The cost is limited, because a few kB of malicious Markdown can take minutes to render or produce many MB of HTML.
"""

import re
import time
import unicodedata
from collections.abc import MutableMapping
from functools import lru_cache
from html import escape, unescape
from typing import Any

import nh3
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

from annotation_ui.rendering import formulas
from annotation_ui.rendering.as_written import parser

MAX_MARKDOWN = 50_000  # characters; twice the length of the longest model replies
MAX_SECONDS = 1.5  # CPU time of this thread; 50,000 typical characters take 0.1 s, or three times that under load
MAX_HTML = 500_000  # characters
_MARKDOWN = parser()
# No images, because loading one would tell its author who reads the text, and when.
_TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "small", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_SCHEMES = {"http", "https", "mailto"}
_CACHED = 100  # entries; a few MB with their HTML, at most 600 MB for quotation marks next to 4-byte characters
_TAG = re.compile("<[^>]*>")


class TooCostlyError(Exception):
    """Raised if text takes too long to render, or its HTML is too large."""


@lru_cache(maxsize=_CACHED)
def to_html(text: str) -> str:
    """Render Markdown as HTML without scripts, styles, images or forms.

    Text that is too long or too costly is shown as plain text. So is text that consists only of markup, such as a rule or an
    empty list, because its rendering would be blank.
    """
    if len(text) > MAX_MARKDOWN:
        return plain_html(text)
    try:
        rendered = _render(text)
    except TooCostlyError:
        return plain_html(text)
    html = nh3.clean(
        rendered,
        tags=_TAGS | formulas.TAGS,
        attributes={
            **formulas.ATTRIBUTES,
            "a": {"href", "title"},
            "ol": {"start"},
            "li": {"value", "data-mark", "data-wide"},
            "th": {"align"},
            "td": {"align"},
        },
        url_schemes=_SCHEMES,
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )
    return html if is_visible(unescape(_TAG.sub("", html))) or not is_visible(text) else plain_html(text)


def is_visible(text: str) -> bool:
    """Return whether the text has a visible character: not a separator, control or format character."""
    return any(unicodedata.category(character)[0] not in "ZC" for character in text)


def text_view(text: str, what: str = "answer") -> dict[str, str]:
    """Return `html` (rendered) and `text` (raw) for the page. Text without visible characters is rendered as a placeholder.

    Args:
        text: Markdown text.
        what: name of the text for the placeholder.
    """
    if is_visible(text):
        return {"html": to_html(text), "text": text}
    placeholder = f"(no visible text in this {what})" if text.strip() else f"(empty {what})"
    return {"html": f"<p><em>{placeholder}</em></p>", "text": text}


def messages_html(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a conversation with rendered and raw content. `cut` marks an incomplete reply."""
    return [
        {"role": message["role"], **text_view(message["content"], "message")} | ({"cut": True} if message.get("cut") else {})
        for message in messages
    ]


def as_messages(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt (text or messages, see docs/data.md) as a list of messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _render(text: str) -> str:
    """Return the unsanitized HTML of Markdown text.

    Raises:
        TooCostlyError: If a limit is exceeded.
    """
    env: MutableMapping[str, Any] = {"deadline": time.thread_time() + MAX_SECONDS}
    tokens = _MARKDOWN.parse(text, env)
    size = 0
    for token in tokens:  # check before joining; many short references can repeat a long address
        for part in (token, *(token.children or ())):
            size += len(part.content) + 2 * len(part.tag) + 20 + sum(len(str(value)) for value in part.attrs.values())
        if size > MAX_HTML:
            raise TooCostlyError
    return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, env))


def plain_html(text: str) -> str:
    """Return HTML that shows every character of the text, without Markdown."""
    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"


def _check_clock(state: StateInline | StateBlock, *_: int) -> bool:
    if time.thread_time() > state.env["deadline"]:
        raise TooCostlyError
    return False


_MARKDOWN.inline.ruler.before("text", "clock", _check_clock)  # checks the deadline at each step
_MARKDOWN.block.ruler.before("table", "clock", _check_clock)
