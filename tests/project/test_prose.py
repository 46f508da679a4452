"""Plain English in the pages and docstrings: sentence length, and how often phrases occur that hide the subject.

The limits are counts per 10,000 words, as found in the documentation of PyTorch and Hugging Face.
"""

import ast
import re

import pytest

from tests.project.markdown import PAGES, ROOT

PACKAGES = sorted(path.parent.name for path in (ROOT / "align").glob("*/__init__.py"))

LONGEST_SENTENCE = 35
LIMITS = {
    "what-clause as a noun": (
        r"\bwhat (is|are|was|were|it|they|the|a|an|this|that|has|had|can|does|did|you|one)\b(?![^.?]*\?)",
        2,
    ),
    "so that": (r"\bso that\b", 3),
    "of its own": (r"\bof (its|their|his|her|your|our) own\b", 0.5),
    "go on": (r"\b(go|goes|going|went|gone) on\b", 0),
    "nobody, whoever": (r"\b(nobody|whoever)\b", 0.2),
    "says": (r"\bsays\b", 0.5),
}


def units_of_page(text):
    """The paragraphs, list items, headings and table cells of a Markdown page, without code blocks and link targets."""
    text = re.sub(r"^---\n.*?^---\n", "", text, flags=re.M | re.S) if text.startswith("---\n") else text
    text = re.sub(r"<!--.*?-->|^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    text = re.sub(
        r"^( {4,}(?![-*] |\d+\. ).*)$",
        lambda line: "" if is_code(text, line.start()) else line.group(),
        text,
        flags=re.M,
    )
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*|#]|\d+\.|:::|\[\d+\]:) ?)", text):
        cells = block.split(" | ") if block.lstrip().startswith("|") else [block]
        yield from (" ".join(cell.strip("|#-* \n").split()) for cell in cells)


def is_code(text, position):
    """Whether an indented line follows a blank line or another indented line outside of a list: a code block."""
    for line in reversed(text[:position].splitlines()):
        if line.strip() and not line.startswith("    "):
            return not re.match(r" *([-*]|\d+\.|\?\?\?|!!!) ?", line)
    return True


DOCSTRING_BLOCK = r"\n\s*\n|\n(?= *(?:[-*]|\d+\.|\w+:) )|(?<=(?:Args|ises):)\n|(?<=Returns:)\n"


def units_of_code(text):
    """The paragraphs, `Args:` entries and help texts of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = re.sub(r"^.*\S {2,}\S.*$", "", node.value.value, flags=re.M)  # without tables
            yield from (" ".join(block.split()) for block in re.split(DOCSTRING_BLOCK, text))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "option":
            words = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "help")]
            yield from (word.value for word in words if isinstance(word, ast.Constant))


def plain(unit):
    """A unit with each code span as one word."""
    return re.sub(r"(`+)[^`]+\1", "CODE", unit)


def sentences(unit):
    return re.split(r"(?<=[.?!:;])[)\"*_]* (?=[\"(*_]*[A-Z])", plain(unit))


def words(text):
    return [word for word in text.split() if re.search(r"\w", word)]


def units(path):
    text = path.read_text(encoding="utf-8")
    return list(units_of_page(text) if path.suffix == ".md" else units_of_code(text))


def counts(paths):
    """Words, occurrences of each phrase, and sentences over the limit."""
    text = "\n".join(plain(unit) for path in paths for unit in units(path))
    found = {name: [match.group() for match in re.finditer(pattern, text, re.I)] for name, (pattern, _) in LIMITS.items()}
    every = [sentence for path in paths for unit in units(path) for sentence in sentences(unit)]
    return len(words(text)), found, [sentence for sentence in every if len(words(sentence)) > LONGEST_SENTENCE]


def over_the_limits(paths):
    total, found, _ = counts(paths)
    return {name: len(found[name]) for name, (_, limit) in LIMITS.items() if len(found[name]) > limit * total / 10_000}


def test_pages_stay_below_the_limits():
    assert over_the_limits(PAGES) == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_have_no_long_sentences(path):
    assert counts([path])[2] == []


@pytest.mark.parametrize("package", ["annotation_ui", *PACKAGES])
def test_docstrings_stay_below_the_limits(package):
    folder = ROOT / package if package == "annotation_ui" else ROOT / "align" / package
    paths = sorted(folder.rglob("*.py"))
    assert over_the_limits(paths) == {}
    assert counts(paths)[2] == []
