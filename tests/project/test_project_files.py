import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.project.markdown import ROOT
from tests.project.test_layers import imports_in

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_targets_that_are_there_on_each_supported_python():
    job = read(".github/workflows/ci.yml")["jobs"]["check"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert (ROOT / commands[0]).stat().st_mode & 0o100
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"] == [lowest, "3.12"]
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


def names_of(requirements):
    """The names of packages in a list of requirements, written as pip compares them."""
    return {re.split(r"[<>=\[;]", entry)[0].strip().lower().replace("_", "-") for entry in requirements}


@pytest.mark.parametrize("folder", ["align", "annotation_ui"])
def test_every_package_that_is_imported_is_declared(folder):
    """Also those that others bring along: they may stop."""
    own = {"align", "annotation_ui", "_typeshed"} | sys.stdlib_module_names
    declared = names_of(PROJECT["dependencies"]).union(*map(names_of, PROJECT["optional-dependencies"].values()))
    imported = {module.split(".")[0] for path in (ROOT / folder).rglob("*.py") for module, _ in imports_in(path)}
    sources, modules = packages_distributions(), imported - own
    assert len(modules) > 10
    assert {module for module in modules if not names_of(sources.get(module, [module])) & declared} == set()


def test_uv_and_pip_install_the_same_versions_of_what_is_required():
    """After a change of requirements, `make lock` writes both files."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    (own,) = [package for package in lock["package"] if "registry" not in package["source"]]
    others = [package for package in lock["package"] if package is not own]
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(pins) == sorted([package["name"], package["version"]] for package in others)
    files = [file for package in others for file in (*package.get("wheels", ()), package.get("sdist")) if file]
    assert all(file["hash"].startswith("sha256:") for file in files)

    locked = {(entry["name"], SpecifierSet(entry.get("specifier", ""))) for entry in own["metadata"]["requires-dist"]}
    required = map(Requirement, [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())])
    assert locked == {(canonicalize_name(entry.name), entry.specifier) for entry in required}


FOLDERS = ("align", "annotation_ui", "configs", "docs", "examples", "notebooks")
PLACES = [ROOT.glob("*"), (ROOT / "benchmarks").glob("*"), *((ROOT / name).rglob("*") for name in FOLDERS)]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for place in PLACES
    for path in place
    if path.suffix in (".md", ".py", ".ipynb", ".yaml", ".txt")
}
FROM_THE_CLONE = {"README.md", "constraints.txt"}
"""Files that may install the clone; all others add extras to what is installed."""


def test_extras_are_named_with_the_package_and_exist():
    found = {}
    for name, text in SOURCES.items():
        for package, extras in re.findall(r"pip install [^`\n]*?'([\w.-]*)\[([\w,-]+)\]", text):
            found.setdefault((package, extras), []).append(name)
    own = {key: names for key, names in found.items() if key[0] in (PROJECT["name"], ".", "align")}
    assert {package for package, _ in own} == {"."}, own  # not the name on PyPI, where the package is not
    assert {extra for _, extras in own for extra in extras.split(",")} <= PROJECT["optional-dependencies"].keys()


def test_one_page_tells_how_to_install_the_clone():
    assert {name for name, text in SOURCES.items() if re.search(r"pip install [^`\n]*-e \.", text)} <= FROM_THE_CLONE
    assert PROJECT["scripts"] == {"align": "align.cli:main"}
    extras = set(re.findall(r"`(\w[\w-]*)`", SOURCES["README.md"].split("Extras add")[1].split("[Container")[0]))
    for_users = PROJECT["optional-dependencies"].keys() - {"dev", "docs", "lm-eval"}
    assert for_users <= extras
