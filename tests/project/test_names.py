import ast
import functools
import re

import pytest

from tests.project.markdown import DOCS, PAGES, ROOT, WRITTEN, text_of
from tests.project.test_layers import SOURCES, nodes_of

PACKAGES = ("align", "annotation_ui")
SPAN = r"(?<!`)`([^`\n]+)`(?!`)(?!\sof commit)"
FOLDERS = "align|annotation_ui|tests|configs|docs|data|forms"
SUFFIXES = (".py", ".yaml", ".json", ".jsonl", ".md", ".js", "/")


def names_in(node):
    """Names that a module or a class defines, imports or assigns, those of its attributes included."""
    found = set()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            found.add(item.attr)
        elif isinstance(item, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in item.names}
    return found


@functools.cache
def classes():
    """Class name -> its names, those of its bases included."""
    nodes = [node for path in SOURCES.values() for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    own = {node.name: names_in(node) for node in nodes}
    bases = {node.name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases} for node in nodes}

    def every(name):
        return own.get(name, set()).union(*(every(base) for base in bases.get(name, ())))

    return {name: every(name) for name in own}


def exists(dotted):
    """Whether a dotted name of a package is a module, a name in one, or an attribute of a class in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        base, rest = ROOT.joinpath(*parts[:count]), parts[count:]
        module = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if module.is_file() or base.is_dir():
            known = not rest or (module.is_file() and rest[0] in names_in(nodes_of(module)[0]))
            return known and (len(rest) < 2 or rest[1] in classes().get(rest[0], set()))
    return False


def wrong_names(text):
    """What a text names and does not exist: a class's attribute, a name of the packages, `path.py: name`, or a path."""
    for span in re.findall(SPAN, text):
        if match := re.fullmatch(r"([A-Z]\w*)\.(\w+)(\(.*\))?", span):
            owner, name, _ = match.groups()
            if owner in classes() and name not in classes()[owner]:
                yield span
        elif re.fullmatch(rf"({'|'.join(PACKAGES)})((\.\w+)+|[\w/]+\.py: [\w.]+)", span):
            if not exists(span.replace(".py: ", ".").replace("/", ".")):
                yield span
        elif re.fullmatch(rf"({FOLDERS}|benchmarks|examples)(/[\w.-]+)+/?", span) and not is_file(span):
            yield span


def is_file(name):
    """Whether a path is there, has a part that the reader replaces, or is none of this repository."""
    return not name.endswith(SUFFIXES) or "NAME" in name or (ROOT / name).exists()


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_name_code_and_link_to_places_that_exist(path):
    text = text_of(path)
    assert list(wrong_names(text)) == []
    assert [name for name in re.findall(rf"\b((?:{FOLDERS}|\.ci)/[\w./-]*\w\.\w+)\b", text) if not is_file(name)] == []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists() or target.resolve() == WRITTEN, link
        assert target.resolve().is_relative_to(DOCS if path.is_relative_to(DOCS) else ROOT), f"{link}: not on the site"
        if anchor and target.suffix == ".md":
            titles = [re.sub(r"[^\w\s-]", "", title).strip() for title in re.findall(r"^#+ (.*)$", text_of(target), re.M)]
            assert anchor in {re.sub(r"[\s-]+", "-", title.lower()) for title in titles}, link


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_code_that_exists(package):
    wrong = {}
    for path in SOURCES.values():
        if path.is_relative_to(ROOT / package):
            nodes = [node for node in nodes_of(path) if isinstance(node, ast.Expr)]
            texts = [node.value.value for node in nodes if isinstance(node.value, ast.Constant)]
            found = [name for text in texts if isinstance(text, str) for name in wrong_names(text)]
            if found:
                wrong[path.relative_to(ROOT).as_posix()] = found
    assert wrong == {}


def test_wrong_names_are_found():
    text = "`Rollout.texts`, `Rollout.gone`, `align.ppo.train.train`, `align.ppo.gone`, `align/ppo/gone.py`, `Trainer.x`"
    text += ", `align/core/files.py: write_text`, `align/core/files.py: gone`"
    assert list(wrong_names(text)) == ["Rollout.gone", "align.ppo.gone", "align/ppo/gone.py", "align/core/files.py: gone"]
    assert len(re.findall(r"`align/[\w/]+\.py: [\w.]+`", text_of(DOCS / "details.md"))) > 20
