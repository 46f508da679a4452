r"""Conversion of LaTeX formulas to MathML, which browsers render without scripts, styles or external fonts.

Delimiters are `\( \)` and `$ $` for inline formulas, and `\[ \]` and `$$ $$` for display formulas. A formula that cannot be
shown completely is left as text. This applies to formulas with a comment, a definition, an error, a command that drops an
argument, or more than `MAX_FORMULA` characters. It also applies if a letter or digit is missing from the result.
"""

import re
import unicodedata
from collections import Counter
from functools import lru_cache
from html import escape, unescape
from xml.etree.ElementTree import Element

from latex2mathml import commands
from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_FORMULA = 2000  # characters; the converter is recursive
ATTRIBUTES = {
    "math": {"display"},
    "mfrac": {"linethickness"},
    "menclose": {"notation"},
    "mi": {"mathvariant"},
    "mo": {"accent", "fence", "form", "stretchy"},
    "mover": {"accent"},
    "mspace": {"width"},
    "mstyle": {"displaystyle", "scriptlevel"},
    "mtable": {"displaystyle"},
    "mtd": {"columnalign"},
}
TAGS = {*ATTRIBUTES, "mn", "mroot", "mrow", "msqrt", "msub", "msubsup", "msup", "mtext", "mtr",
        "munder", "munderover"}  # fmt: skip
"""Allowed MathML elements. Others, such as the element that hides a `\\phantom`, are replaced by their content."""
_MOST_LINES = 100
_DELIMITERS = {r"\(": r"\)", r"\[": r"\]", "$$": "$$", "$": "$"}
_WIDEST = 3.0  # em; a wider space could push the rest out of view
_STYLES = "|".join(name[1:] for name in (*commands.GLOBAL_FONTS, *commands.MSTYLE_SIZES, *commands.STYLES))
_WIDTH = r"-?\d+(?:\.\d+)?\s*(?:em|ex|mu|pt)"
_REFUSED = re.compile(  # comments, definitions, and commands for which the converter drops text
    r"(?<!\\)%|\\smash\s*\[|\\(?:(?:re)?new(?:command|environment)|def|DeclareMathOperator|class|href|style|f?colorbox"
    r"|(?:text)?color|genfrac|sideset|mathchoice|rule|leftroot|uproot|(?:above|atop)withdelims|above|raise|lower"
    r"|move(?:left|right)|skew|unicode)(?![a-zA-Z])"
    rf"|\\(?:[hm]s(?:pace|kip)|m?kern)(?!\s*(?:\{{\s*{_WIDTH}\s*\}}|{_WIDTH}))"
    rf"|\\begin\s*\{{(?:{_STYLES}|skew|unicode)\}}"
)
_ENVIRONMENTS = {"aligned": "split", "gathered": "split", "align": "align*", "gather": "align*", "gather*": "align*"}
_ENVIRONMENT = re.compile(r"(\\(?:begin|end)\{)(" + "|".join(map(re.escape, _ENVIRONMENTS)) + r")\}")
_LAST_CELL = re.compile(  # empty last cell, after which the converter would drop the next row
    r"(?<!\\)&(?=\s*(?:\\\\|\\cr(?![a-zA-Z])|\\end(?![a-zA-Z])|$))"
)
_NOT_SHOWN = re.compile(  # names of environments and commands, array columns, widths of spaces
    r"\\(?:begin|end)\s*\{[^{}]*\}(?:\s*\{[lcr|@\s]*\})?|\\label\s*\{[^{}]*\}"
    rf"|\\[hm]?(?:space|skip|kern)\s*(?:\{{\s*{_WIDTH}\s*\}}|{_WIDTH})|\\[a-zA-Z]+"
)
_TAG = re.compile("<[^>]*>")
_ENTITY = re.compile(r"&#x[0-9A-F]{2,6};")  # as the converter writes characters
_UP_TO_DOLLAR = re.compile(rf"(?:[^$\\\n]|\\.){{1,{MAX_FORMULA}}}?(?<!\s)\$(?!\w)")
_PROSE = re.compile(r"[^\W\d_]{3}|[^\W\d_]{2}\s+[^\W\d_]{2}")
_MATH_SIGNS = re.compile(r"[\\^_=<>]")


def add_formulas(markdown: MarkdownIt) -> None:
    """Add rules for block and inline formulas to a parser."""
    markdown.block.ruler.before("fence", "formula", _block, {"alt": ["paragraph", "blockquote", "list"]})
    markdown.inline.ruler.before("escape", "formula", _inline)
    markdown.add_render_rule("formula", lambda renderer, tokens, at, options, env: tokens[at].content)


@lru_cache(maxsize=1000)
def to_mathml(latex: str, display: bool) -> str | None:
    """Return the MathML of a formula, or None if it cannot be shown completely."""
    if len(latex) > MAX_FORMULA or not latex.strip() or _REFUSED.search(latex):
        return None
    latex = _ENVIRONMENT.sub(lambda match: f"{match[1]}{_ENVIRONMENTS[match[2]]}}}", latex)
    if r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"  # several lines
    latex = _LAST_CELL.sub("&{}", latex)
    try:
        mathml = _written(convert_to_element(latex, display="block" if display else "inline"))
    except Exception:  # the converter raises many kinds of errors
        return None
    return mathml if _characters(_NOT_SHOWN.sub(" ", latex)) <= _characters(unescape(_TAG.sub(" ", mathml))) else None


def _characters(text: str) -> Counter[str]:
    """Count letters and digits, in any mathematical style."""
    return Counter(filter(str.isalnum, unicodedata.normalize("NFKC", text)))


def _written(element: Element) -> str:
    """Serialize an element with all of its text, but only with allowed tags and attributes."""
    inner = _text(element.text) + "".join(_written(child) + _text(child.tail) for child in element)
    if element.tag not in TAGS:
        return inner
    attributes = ""
    for name in sorted(ATTRIBUTES.get(element.tag, set()) & element.attrib.keys()):
        value = element.attrib[name]
        attributes += f' {name}="{escape(_narrow(value) if name == "width" else value)}"'
    return f"<{element.tag}{attributes}>{inner}</{element.tag}>"


def _text(text: str | None) -> str:
    return escape(_ENTITY.sub(lambda match: unescape(match[0]), text or ""))


def _narrow(width: str) -> str:
    found = re.fullmatch(r"(-?[\d.]+)em", width)
    return width if found and 0 <= float(found[1]) <= _WIDEST else "1em"


def _inline(state: StateInline, silent: bool) -> bool:
    source, start = state.src, state.pos
    opening = next((each for each in _DELIMITERS if source.startswith(each, start)), None)
    if opening is None:
        return False
    end = _end(source, start, opening)
    mathml = to_mathml(source[start + len(opening) : end], opening in (r"\[", "$$")) if end > 0 else None
    if mathml is None:
        return False
    if not silent:
        state.push("formula", "math", 0).content = mathml
    state.pos = end + len(opening)
    return True


def _end(source: str, start: int, opening: str) -> int:
    """Return the position of the closing delimiter, or -1 if this is not a formula, such as an amount of money."""
    first = start + len(opening)
    if opening != "$":
        return source.find(_DELIMITERS[opening], first, first + MAX_FORMULA + 2)
    before = source[start - 1 : start]
    match = _UP_TO_DOLLAR.match(source, first)
    if match is None or before.isalnum() or source[first].isspace():
        return -1
    return match.end() - 1 if _is_formula(source[first : match.end() - 1]) else -1


def _is_formula(text: str) -> bool:
    """Return whether the text between two dollar signs is a formula, not text between two prices."""
    if text[0].isdigit() and "\\" not in text:
        return not _PROSE.search(text) and bool(_MATH_SIGNS.search(text))
    return bool(_MATH_SIGNS.search(text)) or not (_PROSE.search(text) or re.search(r"\s", text))


def _block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """Parse a display formula. Its lines are not parsed as lists or headings."""
    if state.is_code_block(start_line):
        return False
    start = state.bMarks[start_line] + state.tShift[start_line]
    opening = state.src[start : start + 2]
    if opening not in ("$$", r"\["):
        return False
    closing, lines = _DELIMITERS[opening], []
    for line in range(start_line, min(end_line, start_line + _MOST_LINES)):
        first = start + 2 if line == start_line else state.bMarks[line] + state.tShift[line]
        text = state.src[first : state.eMarks[line]].rstrip()
        if line > start_line and (state.sCount[line] < state.blkIndent or not text):
            return False
        lines.append(text.removesuffix(closing))
        if closing in text:
            break
    else:
        return False
    mathml = to_mathml("\n".join(lines), True) if text.index(closing) == len(text) - 2 else None
    if mathml is None:
        return False
    if not silent:
        state.line = line + 1
        state.push("formula", "math", 0).content = f"<p>{mathml}</p>\n"
    return True
