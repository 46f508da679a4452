"""Instructions to install are of the clone, and name extras that exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
SOURCES = [name for name in TRACKED if name.endswith((".md", ".py", ".ipynb", ".yaml")) and not name.startswith("tests/")]
FROM_THE_CLONE = {"README.md", "constraints.txt"}
"""Files that may install the clone; all others add extras to what is installed."""


def text_of(name):
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.skipif(len(SOURCES) < 2, reason="not a git checkout")
def test_extras_are_named_with_the_package_and_exist():
    found = {}
    for name in SOURCES:
        for package, extras in re.findall(r"pip install [^`\n]*?'([\w.-]*)\[([\w,-]+)\]", text_of(name)):
            found.setdefault((package, extras), []).append(name)
    own = {key: names for key, names in found.items() if key[0] in (PROJECT["name"], ".", "align")}
    assert {package for package, _ in own} == {"."}, own  # not the name on PyPI, where the package is not
    assert {extra for _, extras in own for extra in extras.split(",")} <= PROJECT["optional-dependencies"].keys()


@pytest.mark.skipif(len(SOURCES) < 2, reason="not a git checkout")
def test_one_page_tells_how_to_install_the_clone():
    assert {name for name in SOURCES if re.search(r"pip install [^`\n]*-e \.", text_of(name))} <= FROM_THE_CLONE
    assert PROJECT["scripts"] == {"align": "align.cli:main"}
    extras = set(re.findall(r"`(\w[\w-]*)`", text_of("README.md").split("Extras add")[1].split("[Container")[0]))
    for_users = PROJECT["optional-dependencies"].keys() - {"dev", "docs", "lm-eval"}
    assert for_users <= extras
