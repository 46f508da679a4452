"""The files that describe the project to others: continuous integration, hooks, citation, changelog, the site's map."""

import ast
import dataclasses
import re
import runpy
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_everything_on_each_supported_python():
    job = read(".github/workflows/ci.yml")["jobs"]["check"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert (ROOT / commands[0]).stat().st_mode & 0o100
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"] == [lowest, "3.12"]


def test_continuous_integration_runs_targets_that_are_there():
    script, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "Makefile"))
    targets = re.findall(r"^make ([\w-]+)", script, re.M)
    assert {"lint", "docs", "test-full"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    assert "mkdocs build --strict\n" in makefile  # with --quiet, warnings would not count


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", text, re.M)


def pages(entries):
    """The files of a `nav`, through all its levels."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from pages(value) if isinstance(value, list) else [value]


def test_the_site_shows_every_page_once():
    docs = ROOT / "docs"
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    written = "settings.md"  # by docs/write_settings.py, in make docs
    assert sorted(pages(read("mkdocs.yml")["nav"])) == sorted(there | {written})


def test_the_page_of_settings_has_every_setting_of_every_command():
    from align.cli import stage_configs, stages_with_settings

    module = runpy.run_path(str(ROOT / "docs" / "write_settings.py"))
    text = module["page"]()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    shared = {module["anchor"](title): body for title, body in re.findall(r"^### (.*)\n\n((?:\|.*\n)+)", text, re.M)}
    commands = [*stage_configs(), "sample", "chat", "loop", "plan", *(f"eval {name}" for name in module["TASKS"])]
    assert sorted(sections) == sorted([*(f"align {command}" for command in commands), "Shared settings", "Other names"])
    for command in commands:
        body = sections[f"align {command}"]
        linked = [shared[name] for name in re.findall(r"\]\(#((?!block-).*?)\)", body)]
        names = set(re.findall(r"^ *\| `(\w+)`", "".join([body, *linked]), re.M))
        assert names == {field.name for field in dataclasses.fields(stages_with_settings()[command].load()[0])}
    assert len(re.findall(r"^\| `learning_rate`", sections["align ppo"], re.M)) == 1
    assert "| `cliprange` | number | `0.2` | epsilon of the policy's ratio clip |" in text


def names_of(requirements):
    """The names of packages in a list of requirements, written as pip compares them."""
    return {re.split(r"[<>=\[;]", entry)[0].strip().lower().replace("_", "-") for entry in requirements}


def imported_modules(folder):
    """The first part of every module that the files of a folder import, also inside functions."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]


@pytest.mark.parametrize("folder", ["align", "annotation_ui"])
def test_every_package_that_is_imported_is_declared(folder):
    """Also those that others bring along: they may stop."""
    own = {"align", "annotation_ui", "_typeshed"} | sys.stdlib_module_names
    declared = names_of(PROJECT["dependencies"]).union(*map(names_of, PROJECT["optional-dependencies"].values()))
    sources, modules = packages_distributions(), set(imported_modules(folder)) - own
    assert len(modules) > 10
    assert {module for module in modules if not names_of(sources.get(module, [module])) & declared} == set()
