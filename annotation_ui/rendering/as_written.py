"""Markdown parser that shows characters that Markdown would drop.

Labelers must see the complete response. Line breaks are rendered as breaks. Images and link definitions are rendered as
text, and so is an asterisk between two letters or digits. Lists keep their numbers. Entities and most backslashes are
unchanged. Only cells beyond a table's columns are not shown. The page can also show the raw text.
"""

from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.state_inline import Delimiter
from markdown_it.token import Token

from annotation_ui.rendering.formulas import add_formulas

# A backslash before one of these is a Markdown escape. Before others it is mostly LaTeX, such as \( and \{.
_MARKS = frozenset("*_`~#")
WIDE = 3  # digits of a list number that fit into the default indentation


def parser() -> MarkdownIt:
    """Return a CommonMark parser with tables and strikethrough that shows all characters."""
    markdown = MarkdownIt("commonmark", {"html": False, "linkify": False, "breaks": True})
    markdown.enable(["table", "strikethrough"])
    markdown.disable(["reference", "lheading"])  # they would drop "[a]: b" and a line of dashes below text
    markdown.inline.ruler.at("emphasis", _emphasis)
    markdown.core.ruler.before("text_join", "as_written", _keep_characters)
    add_formulas(markdown)
    markdown.add_render_rule("image", _image)
    markdown.add_render_rule("fence", _fence)
    return markdown


def _emphasis(state: StateInline, silent: bool) -> bool:
    """Apply the default rule for * and _, except to * inside a word or product (5*6*7) and to __ (__init__)."""
    marker = state.src[state.pos]
    if silent or marker not in "*_":
        return False
    length = state.scanDelims(state.pos, True).length
    before, after = state.src[state.pos - 1 : state.pos], state.src[state.pos + length : state.pos + length + 1]
    within_word = before.isascii() and before.isalnum() and after.isascii() and after.isalnum()
    scanned = state.scanDelims(state.pos, marker == "*" and not within_word)  # other scripts have no spaces between words
    dunder = marker == "_" and length > 1
    for _ in range(length):
        state.push("text", "", 0).content = marker
        if not dunder:
            state.delimiters.append(
                Delimiter(ord(marker), length, len(state.tokens) - 1, -1, scanned.can_open, scanned.can_close)
            )
    state.pos += length
    return True


def _keep_characters(state: StateCore) -> None:
    for token in state.tokens:
        if token.type == "list_item_open" and token.info:
            token.attrSet("value", token.info)
            token.attrSet("data-mark", token.info + token.markup)
            if len(token.info) > WIDE:
                token.attrSet("data-wide", "")  # tells the page to widen the indentation
        if token.type in ("th_open", "td_open"):  # styles are removed by the sanitizer
            align = str(token.attrs.pop("style", "")).removeprefix("text-align:")
            token.attrs |= {"align": align} if align else {}
        for child in token.children or []:
            if child.type == "text_special" and not (child.info == "escape" and child.content in _MARKS):
                child.content = child.markup


def _image(renderer: RendererHTML, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    token = tokens[at]
    title = token.attrs.get("title")
    return escapeHtml(f"![{token.content}]({token.attrs['src']}" + (f' "{title}")' if title else ")"))


def _fence(renderer: RendererHTML, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    """Render a code block with its language name."""
    name = tokens[at].info.strip()
    label = f"<small>{escapeHtml(name)}</small>\n" if name else ""
    return f"<pre>{label}<code>{escapeHtml(tokens[at].content)}</code></pre>\n"
