"""Packages of the app import only those below them, and no module stands in a circle of imports."""

import ast
from graphlib import TopologicalSorter

from tests.annotation_ui.running import ROOT

LAYERS = (
    "client", "rendering", "tasks", "store", "reports", "server", "lead_tabs", "app", "cli_common", "cli_users", "cli",
)  # fmt: skip
"""From the ground up. Migrations know only the tables."""
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in (ROOT / "annotation_ui").rglob("*.py")
    if "migrations" not in path.parts and path.name != "__init__.py"
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("annotation_ui"):
            for alias in node.names:
                nested = f"{node.module}.{alias.name}"
                yield nested if nested in SOURCES else node.module


def test_imports_point_downwards_and_never_in_a_circle():
    graph = {name: set(imports_of(path)) for name, path in SOURCES.items()}
    assert sum(len(imported) for imported in graph.values()) > 150
    for name, imported in graph.items():
        own = LAYERS.index(name.split(".")[1])
        assert [each for each in imported if LAYERS.index(each.split(".")[1]) > own] == [], name
    TopologicalSorter(graph).prepare()
