"""Hostile text to safe HTML: the only place that renders what a model or a prompt's author wrote."""

from __future__ import annotations

from typing import Any

import nh3
from markdown_it import MarkdownIt

_MARKDOWN = MarkdownIt("commonmark", {"html": False, "linkify": False}).enable(["table", "strikethrough"])
# No images: a picture's address would tell its author who reads it, and when.
_TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_SCHEMES = {"http", "https", "mailto"}


def to_html(text: str) -> str:
    """Markdown to HTML that holds no script, no style, no image and no form, whatever the text."""
    return nh3.clean(
        _MARKDOWN.render(text),
        tags=_TAGS,
        attributes={"a": {"href", "title"}, "ol": {"start"}},
        url_schemes=_SCHEMES,
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )


def messages_html(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each message of a conversation with its content rendered."""
    return [{"role": message["role"], "html": to_html(message["content"])} for message in messages]


def as_messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as docs/data.md has it (text, or a list of messages) as a list of messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
