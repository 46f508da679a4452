"""Container files: hadolint, and names in them that exist. No image is built here."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from annotation_ui.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))


def rests(path, name):
    """What stands behind the instructions of that name in a Dockerfile."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.split()[:1] == [name]]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_is_clean_copies_what_is_sent_and_pins_what_it_installs(path):
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert "*" in rules
    copied = {source for rest in rests(path, "COPY") for source in rest.split()[:-1]}
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    assert {source for source in copied if not any(fnmatch(source, rule) for rule in kept)} == set()
    assert copied >= {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "align", "annotation_ui"}
    installs = [command for rest in rests(path, "RUN") for command in rest.split("&&") if "pip install" in command]
    assert len(installs) == 2
    for command in installs:
        assert "-c constraints.txt" in command
        for extras in re.findall(r"\.\[([\w,-]+)\]", command):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert rests(path, "USER")[-1].isdigit(), "not root"
    (base,) = rests(path, "FROM")
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d-devel-ubuntu24\.04|python:3\.1[1-9]-slim-bookworm", base)
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_composed_app_is_started_as_its_command_line_allows():
    app, db = COMPOSE["services"]["app"], COMPOSE["services"]["db"]
    assert (ROOT / "docker" / app["build"]["context"]).resolve() == ROOT
    assert (ROOT / app["build"]["dockerfile"]).is_file()
    words = shlex.split(app["command"])
    assert words[:2] == ["align", "annotate"]
    options = _parser().parse_args(words[2:])
    user, database = db["environment"]["POSTGRES_USER"], db["environment"]["POSTGRES_DB"]
    assert options.database == f"postgresql://{user}@db/{database}"
    assert app["environment"]["PGPASSWORD"] == db["environment"]["POSTGRES_PASSWORD"]
    (port,) = app["ports"]
    assert port == f"127.0.0.1:7860:{options.port}", "no other machine reaches it"
    mounted = [volume.split(":") for service in (app, db) for volume in service["volumes"]]
    assert {name for name, _ in mounted} == COMPOSE["volumes"].keys()
    assert str(options.data_dir) in {folder for _, folder in mounted}
