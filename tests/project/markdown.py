"""The pages of docs/ as text: sections, tables and what stands in code spans."""

import re

from tests.files import ROOT

DOCS = ROOT / "docs"
WRITTEN = DOCS / "settings.md"
"""Written from help texts by docs/write_settings.py in `make docs`: not there before."""
README = ROOT / "README.md"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))]
PAGES += sorted(set(DOCS.rglob("*.md")) - {WRITTEN})


def text_of(path):
    return path.read_text(encoding="utf-8")


def page(name):
    return text_of(DOCS / f"{name}.md")


def section(text, title):
    """The text from a heading of the second level to the next."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S).group(1)


def table(text, first):
    """The rows of the first table whose header begins with `first`, each as a list of cells."""
    body = re.search(rf"^\| {re.escape(first)}.*\n\| ---.*\n((?:\|.*\n?)*)", text, re.M).group(1)
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in body.splitlines()]


def code_in(text):
    """What stands in `code` spans."""
    return re.findall(r"`([^`\n]+)`", text)
