"""The shape of the packages: imports point downwards and never in a circle, hierarchies of classes are flat."""

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
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def sources_of(package):
    """Module -> file."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


SOURCES = sources_of("align")


@cache  # not on import: every worker collects this file, and one needs it
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports_of(name):
    """The modules of this package that one imports, `from package import module` resolved to the module."""
    path, found = SOURCES[name], set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: launching a script breaks relative imports"
            nested = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= nested & SOURCES.keys() if nested <= SOURCES.keys() else (nested & SOURCES.keys()) | {node.module}
    return {name for name in found if name in SOURCES}


def part_of(module):
    """The file or folder right under align/ that a module stands in; "" for align itself."""
    return ".".join(module.split(".")[1:2])


def test_every_file_has_a_layer_and_every_layer_has_files():
    assert {part_of(name) for name in SOURCES} - {""} == LEVEL.keys()
    assert sum(len(imports_of(name)) for name in SOURCES) > 300


@pytest.mark.parametrize("part", sorted(LEVEL))
def test_imports_point_downwards(part):
    for name in (name for name in SOURCES if part_of(name) == part):
        for imported in imports_of(name) - {"align"}:
            below = part_of(imported) == part or LEVEL[part_of(imported)] < LEVEL[part]
            assert below, f"{name} imports {imported}, which stands above or beside it"


def test_no_circle():
    """A package's own `__init__` only gathers what its modules offer, so importing the package is not an import of it."""
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    graph = {name: imports_of(name) - packages for name in SOURCES.keys() - packages}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


@cache
def classes():
    """(package, class) -> the names of its bases; a class of `align` has a name of its own there, but for those of TRL."""
    found, twice = {}, []
    for package in ("align", "annotation_ui"):
        for name, path in sources_of(package).items():
            for node in nodes_of(path):
                if isinstance(node, ast.ClassDef) and part_of(name) != "trl":
                    twice += [node.name] if package == "align" and (package, node.name) in found else []
                    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                    found[package, node.name] = [base for base in bases if base != node.name]
    assert twice == []
    return found


def longest_chain(package, name):
    """A class and the longest chain of its bases in the packages, the first base first."""
    places = [
        (place, base) for base in classes()[package, name] for place in {package, "align"} if (place, base) in classes()
    ]
    return [*max((longest_chain(*place) for place in places), key=len, default=[]), name]


def test_a_class_is_at_most_one_below_its_base():
    """A command's settings may be two below `Settings`: a base, groups, and classes that list groups."""
    chains = [longest_chain(*place) for place in classes()]
    assert len(chains) > 300
    assert [chain for chain in chains if len(chain) > (3 if chain[0] == "Settings" else 2)] == []
    assert max(map(len, chains)) == 3, "settings are found"
