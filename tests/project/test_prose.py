"""Sentence length in the pages, docstrings and help texts."""

import ast
import re

import pytest

from tests.project.markdown import PAGES, ROOT

PACKAGES = sorted(path.parent.name for path in (ROOT / "align").glob("*/__init__.py"))

LONGEST_SENTENCE = 35


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


def long_sentences(paths):
    every = [sentence for path in paths for unit in units(path) for sentence in sentences(unit)]
    return [sentence for sentence in every if len(words(sentence)) > LONGEST_SENTENCE]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_have_no_long_sentences(path):
    assert long_sentences([path]) == []


@pytest.mark.parametrize("package", ["annotation_ui", *PACKAGES])
def test_docstrings_have_no_long_sentences(package):
    folder = ROOT / package if package == "annotation_ui" else ROOT / "align" / package
    assert long_sentences(sorted(folder.rglob("*.py"))) == []
