"""Renders untrusted Markdown as safe HTML. All text of models and prompts is rendered here and nowhere else."""

import re
import unicodedata
from html import unescape
from typing import Any

import nh3

from annotation_ui.rendering import formulas
from annotation_ui.rendering.as_written import parser
from annotation_ui.rendering.render_limits import bounded, limited, plain_html, render

_MARKDOWN = limited(parser())
# No images: loading one would show its author who reads the text, and when.
_TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "small", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_SCHEMES = {"http", "https", "mailto"}
_TAG = re.compile("<[^>]*>")


@bounded
def to_html(text: str) -> str:
    """Render Markdown as HTML without scripts, styles, images or forms, whatever the text contains.

    A text of marks alone (a rule of dashes, an empty list) is shown as it is: no visible text has a blank rendering.
    """
    html = nh3.clean(
        render(_MARKDOWN, text),
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
    """Whether any character of the text can be seen: neither a separator nor a control or format character."""
    return any(unicodedata.category(character)[0] not in "ZC" for character in text)


def text_view(text: str, what: str = "answer") -> dict[str, str]:
    """A text as the page shows it: rendered, and as it was written. A text without a visible character gets a placeholder.

    Args:
        what: a name of the text, shown in place of an empty one.
    """
    if is_visible(text):
        return {"html": to_html(text), "text": text}
    placeholder = f"(no visible text in this {what})" if text.strip() else f"(empty {what})"
    return {"html": f"<p><em>{placeholder}</em></p>", "text": text}


def messages_html(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each message of a conversation with its content rendered, and as it was written."""
    return [{"role": message["role"], **text_view(message["content"], "message")} for message in messages]


def as_messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt (text or a list of messages, see docs/data.md) as a list of messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
