"""The difference between two texts as HTML, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

MAX_WORDS = 4000  # of both texts; SequenceMatcher is quadratic
_WORD = re.compile(r"\s+|\w+|.", re.DOTALL)


def difference_html(before: str, after: str) -> str:
    """Both texts in one: removed words in `<del>`, added ones in `<ins>`. Long texts are one removal and one addition."""
    old, new = _WORD.findall(before), _WORD.findall(after)
    if len(old) + len(new) > MAX_WORDS:
        return _part("del", before) + _part("ins", after)
    parts = []
    for kind, start, end, new_start, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(escape("".join(old[start:end])))
        else:
            parts.append(_part("del", "".join(old[start:end])) + _part("ins", "".join(new[new_start:new_end])))
    return "".join(parts)


def _part(tag: str, text: str) -> str:
    return f"<{tag}>{escape(text)}</{tag}>" if text else ""
