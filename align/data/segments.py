"""Sentences of a text: the segments that fine-grained rewards belong to (Wu et al. 2023, arXiv 2306.01693)."""

import re

_CLOSING = r"""["'”’»)\]*_」』）]*+"""
# A mark of the end of a sentence with a space behind it, one of a script without spaces, a line break, or the end.
_BOUNDARY = re.compile(rf"(?<![.!?…؟۔])[.!?…؟۔]++{_CLOSING}(?=\s)|(?<![。！？｡])[。！？｡]++{_CLOSING}|\n|\Z")


def segment_ends(text: str) -> list[int]:
    """The offset, in code points, behind each sentence or line of a text; a blank line belongs to the next sentence.

    The text before an offset ends without whitespace. The last offset is the end of the text without trailing whitespace.
    """
    ends, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        part = text[start : boundary.end()]
        if part.strip():
            ends.append(start + len(part.rstrip()))
        start = boundary.end()
    return ends
