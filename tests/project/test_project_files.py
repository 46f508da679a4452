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


def test_the_workflows_run_targets_that_are_there():
    """On each supported Python: everything; alone, so that each has a result of its own: lint, documentation, wheel."""
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert {".ci/run", "make lint", "make docs", "make wheel"} <= commands
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert PROJECT["requires-python"] == ">=" + jobs["check"]["strategy"]["matrix"]["python"][0]
    script, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "Makefile"))
    targets = {target for text in (script, *commands) for target in re.findall(r"^make ([\w-]+)", text, re.M)}
    assert {"lint", "docs", "wheel", "test-full"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


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


def test_extras_are_named_with_the_package_and_exist():
    found = {}
    for name, text in SOURCES.items():
        for package, extras in re.findall(r"pip install [^`\n]*?'([\w.-]*)\[([\w,-]+)\]", text):
            found.setdefault((package, extras), []).append(name)
    own = {key: names for key, names in found.items() if key[0] in (PROJECT["name"], ".", "align")}
    assert {package for package, _ in own} == {"."}, own  # not the name on PyPI, where the package is not
    assert {extra for _, extras in own for extra in extras.split(",")} <= PROJECT["optional-dependencies"].keys()
