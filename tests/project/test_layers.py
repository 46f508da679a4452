"""Imports point downwards through the layers of the package, and never in a circle; imports inside functions count too."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted((ROOT / "align").rglob("*.py"))}


@cache  # not on import: every worker collects this file, and one needs it
def imports_of(name):
    """The modules of this package that one imports, `from package import module` resolved to the module."""
    path, found = SOURCES[name], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: launching a script breaks relative imports"
            nested = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (nested & SOURCES.keys()) or {node.module}
            if not nested <= SOURCES.keys():
                found.add(node.module)
    return {name for name in found if name in SOURCES}


def part_of(module):
    """The file or folder right under align/ that a module stands in; "" for align itself."""
    return ".".join(module.split(".")[1:2])


def test_every_file_has_a_layer_and_every_layer_has_files():
    parts = {part_of(name) for name in SOURCES} - {""}
    assert parts - LEVEL.keys() == set()
    assert LEVEL.keys() - parts == set()
    assert len(SOURCES) > 80
    assert sum(len(imports_of(name)) for name in SOURCES) > 300


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"align"}))
def test_imports_point_downwards(name):
    level = LEVEL[part_of(name)]
    for imported in imports_of(name) - {"align"}:
        same = part_of(imported) == part_of(name)
        assert same or LEVEL[part_of(imported)] < level, f"{name} imports {imported}, which stands above or beside it"


def test_no_circle():
    """A package's own `__init__` only gathers what its modules offer, so importing the package is not an import of it."""
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    graph = {name: imports_of(name) - packages for name in SOURCES.keys() - packages}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def test_a_class_has_a_name_of_its_own():
    """One name means one thing, also where two modules never meet. `align.trl` repeats the names of TRL's classes."""
    places = {}
    for name, path in SOURCES.items():
        if part_of(name) == "trl":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_the_core_imports_no_extra():
    """It names them as "module:name" strings, and imports what a setting asks for."""
    core = [name for name in SOURCES if part_of(name) != "extras"]
    assert [name for name in core if any(part_of(imported) == "extras" for imported in imports_of(name))] == []


def test_nobody_imports_the_command_line():
    assert [name for name in SOURCES if "align.cli" in imports_of(name)] == []
