"""Limits the cost of rendering a text. A few kB of Markdown can be made to take minutes, or to become many MB of HTML.

A text beyond a limit is shown as it was written. Each text is rendered once: its HTML stays in a cache of limited size.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_MARKDOWN = 50_000  # characters; the longest replies of models are half as long
MAX_SECONDS = 1.5  # of this thread's computing time; 50,000 usual characters take 0.1 s, three times that under load
MAX_HTML = 500_000  # characters
CACHE_SIZE = 64_000_000  # characters of texts and their HTML


class TooCostlyError(Exception):
    """A text would take too long to render, or become too large."""


def limited(markdown: MarkdownIt) -> MarkdownIt:
    """Let a parser look at the clock at each step, which lets `render` can stop it."""
    markdown.inline.ruler.before("text", "clock", _check_clock)
    markdown.block.ruler.before("table", "clock", _check_clock_of_block)
    return markdown


def render(markdown: MarkdownIt, text: str) -> str:
    """The HTML of a text by a `limited` parser.

    Raises:
        TooCostlyError: beyond one of the limits.
    """
    env: MutableMapping[str, Any] = {"deadline": time.thread_time() + MAX_SECONDS}
    tokens = markdown.parse(text, env)
    size = 0
    for token in tokens:  # before they are joined: a thousand short references to one long address
        for part in (token, *(token.children or ())):
            size += len(part.content) + 2 * len(part.tag) + 20 + sum(len(str(value)) for value in part.attrs.values())
        if size > MAX_HTML:
            raise TooCostlyError
    return str(markdown.renderer.render(tokens, markdown.options, env))


def bounded(to_html: Callable[[str], str]) -> Callable[[str], str]:
    """Keep what `to_html` returns, and show a text that is too long or too costly as it was written."""
    cache: OrderedDict[str, str] = OrderedDict()
    lock = threading.Lock()
    size = 0

    @functools.wraps(to_html)
    def bounded_to_html(text: str) -> str:
        nonlocal size
        with lock:
            if text in cache:
                cache.move_to_end(text)
                return cache[text]
        try:
            html = to_html(text) if len(text) <= MAX_MARKDOWN else plain_html(text)
        except TooCostlyError:
            html = plain_html(text)
        with lock:
            if text not in cache:
                cache[text] = html
                size += len(text) + len(html)
            while size > CACHE_SIZE:
                old_text, old_html = cache.popitem(last=False)
                size -= len(old_text) + len(old_html)
        return html

    return bounded_to_html


def plain_html(text: str) -> str:
    """A text as HTML that shows every character of it, not rendered as Markdown."""
    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"


def _check_clock(state: StateInline, silent: bool) -> bool:
    if time.thread_time() > state.env["deadline"]:
        raise TooCostlyError
    return False


def _check_clock_of_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if time.thread_time() > state.env["deadline"]:
        raise TooCostlyError
    return False
