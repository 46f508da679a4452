"""Names of code in pages and docstrings: each `Class.attribute`, dotted name of the packages and path exists."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("align", "annotation_ui")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))]
SPAN = r"(?<!`)`([^`\n]+)`(?!`)(?!\sof commit)"
FOLDERS = "|".join((*PACKAGES, "tests", "configs", "docs", "data", "forms", "benchmarks", "examples"))
SUFFIXES = (".py", ".yaml", ".json", ".jsonl", ".md", ".js", "/")


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def classes():
    """Class name -> its names, those of its bases included."""
    nodes = [node for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    own = {node.name: names_of_class(node) for node in nodes}
    bases = {node.name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases} for node in nodes}

    def every(name):
        return own.get(name, set()).union(*(every(base) for base in bases.get(name, ())))

    return {name: every(name) for name in own}


def names_of_class(node):
    """Methods, fields and attributes that a class or its methods assign."""
    found = set()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            found.add(item.attr)
    return found


@functools.cache
def names_in_module(path):
    """Names that a module defines or imports."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def exists(dotted):
    """Whether a dotted name of a package is a module, a name in one, or an attribute of a class in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        module = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if module.is_file() or base.is_dir():
            rest = parts[count:]
            if not rest:
                return True
            known = module.is_file() and rest[0] in names_in_module(module)
            return known and (len(rest) == 1 or rest[1] in classes().get(rest[0], set()))
    return False


def is_file_name(span):
    """Whether a code span is the path of a file of this repository, without a part that the reader replaces."""
    path = re.fullmatch(rf"({FOLDERS})(/[\w.-]+)+/?", span)
    return path is not None and span.endswith(SUFFIXES) and "NAME" not in span


def wrong_names(text):
    """The code spans of a text that name a class's attribute, a name of the packages or a path that does not exist."""
    for span in re.findall(SPAN, text):
        if match := re.fullmatch(r"([A-Z]\w*)\.(\w+)(\(.*\))?", span):
            owner, name, _ = match.groups()
            if owner in classes() and name not in classes()[owner]:
                yield span
        elif re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", span):
            if not exists(span):
                yield span
        elif is_file_name(span) and not (ROOT / span).exists():
            yield span


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_name_code_that_exists(path):
    assert list(wrong_names(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_code_that_exists(package):
    wrong = {}
    for path in SOURCES:
        if path.is_relative_to(ROOT / package):
            nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)]
            texts = [node.value.value for node in nodes if isinstance(node.value, ast.Constant)]
            found = [name for text in texts if isinstance(text, str) for name in wrong_names(text)]
            if found:
                wrong[path.relative_to(ROOT).as_posix()] = found
    assert wrong == {}


def test_wrong_names_are_found():
    text = "`Rollout.texts`, `Rollout.gone`, `align.ppo.train.train`, `align.ppo.gone`, `align/ppo/gone.py`, `Trainer.x`"
    assert list(wrong_names(text)) == ["Rollout.gone", "align.ppo.gone", "align/ppo/gone.py"]
