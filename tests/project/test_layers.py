import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.project.markdown import ROOT

LAYERS = (
    {"core"},
    {"data", "runtime"},
    {"model_registry"},
    {"tokenization"},
    {"models"},
    {"batches"},
    {"training"},
    {"sampling", "reward", "sft"},
    {"dpo", "ppo"},
    {"eval", "trl"},
    {"commands"},
    {"extras"},
    {"cli"},
)
"""From the ground up: a module may import its own package and what stands in layers below it."""
APP_LAYERS = ("client", "rendering", "tasks", "store", "migrations", "reports", "server", "lead_tabs")
APP_LAYERS += ("app", "cli_common", "cli_users", "cli")
LEVEL = {f"align.{part}": level for level, parts in enumerate(LAYERS) for part in parts}
LEVEL |= {f"annotation_ui.{part}": level for level, part in enumerate(APP_LAYERS)}


def sources_of(package):
    """Module -> file."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


SOURCES = sources_of("align") | sources_of("annotation_ui")


@cache  # not on import: every worker collects this file, and one needs it
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_in(path):
    """Each import of a file, also inside functions: the module, and the names that are taken from it."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: launching a script breaks relative imports"
            yield node.module, [alias.name for alias in node.names]


@cache
def imports_of(name):
    """The modules of the packages that one imports, `from package import module` resolved to the module."""
    found = set()
    for module, names in imports_in(SOURCES[name]):
        nested = {f"{module}.{each}" for each in names}
        found |= nested if names and nested <= SOURCES.keys() else nested | {module}
    return found & SOURCES.keys()


def part_of(module):
    """The package and the file or folder right under it that a module stands in: align.core."""
    return ".".join(module.split(".")[:2])


def test_every_file_has_a_layer_and_every_layer_has_files():
    assert {part_of(name) for name in SOURCES} - {"align", "annotation_ui"} == LEVEL.keys()
    assert sum(len(imports_of(name)) for name in SOURCES) > 450


@pytest.mark.parametrize("part", sorted(LEVEL))
def test_imports_point_downwards(part):
    package = part.split(".")[0]
    for name in (name for name in SOURCES if part_of(name) == part):
        for imported in (each for each in imports_of(name) - {package} if each.startswith(f"{package}.")):
            below = part_of(imported) == part or LEVEL[part_of(imported)] < LEVEL[part]
            assert below, f"{name} imports {imported}, which stands above or beside it"


def test_no_circle():
    """Also through `__init__` files. Importing a module runs those above it, which the imports of a file do not name."""
    graph = {name: imports_of(name) for name in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")
