"""A Markdown parser that keeps a model's text: characters that Markdown would drop are shown as text.

A labeler judges the answer, not its rendering. Line breaks are breaks. Images and link definitions are text. An
asterisk between two letters or digits is an asterisk. A list keeps its numbers. Entities and most backslashes stay as
they are. Only cells beyond a table's columns are not shown; the page can always show the text itself.
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

# A backslash before one of these is Markdown's own; before others it is mostly LaTeX, such as \( and \{.
_MARKS = frozenset("*_`~#")
WIDE = 3  # digits of a list's number for which every list has room


def parser() -> MarkdownIt:
    """Return a CommonMark parser with tables and strikethrough that shows all characters."""
    markdown = MarkdownIt("commonmark", {"html": False, "linkify": False, "breaks": True})
    markdown.enable(["table", "strikethrough"])
    markdown.disable(["reference", "lheading"])  # they would swallow "[a]: b" and a line of dashes under a text
    markdown.inline.ruler.at("emphasis", _emphasis)
    markdown.core.ruler.before("text_join", "as_written", _keep_characters)
    add_formulas(markdown)
    markdown.add_render_rule("image", _image)
    markdown.add_render_rule("fence", _fence)
    return markdown


def _emphasis(state: StateInline, silent: bool) -> bool:
    """The parser's own rule for * and _, but * inside of a word or a product (5*6*7) and __ (__init__) mark nothing."""
    marker = state.src[state.pos]
    if silent or marker not in "*_":
        return False
    length = state.scanDelims(state.pos, True).length
    before, after = state.src[state.pos - 1 : state.pos], state.src[state.pos + length : state.pos + length + 1]
    within_word = before.isascii() and before.isalnum() and after.isascii() and after.isalnum()
    scanned = state.scanDelims(state.pos, marker == "*" and not within_word)  # other scripts have no spaces to go by
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
                token.attrSet("data-wide", "")  # for the page, which leaves room for it
        if token.type in ("th_open", "td_open"):  # a style would be removed with every other one
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
    """Render a code block with the name of its language."""
    name = tokens[at].info.strip()
    label = f"<small>{escapeHtml(name)}</small>\n" if name else ""
    return f"<pre>{label}<code>{escapeHtml(tokens[at].content)}</code></pre>\n"
