import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from align.core.files import FOLDERS, package_data_root, resolve_path
from tests.files import ROOT
from tests.http_stand_in import answering

BUILT_FROM = ("align", "annotation_ui", "configs", "data", "forms")
BUILT_FROM += ("pyproject.toml", "README.md", "LICENSE")


def test_a_path_means_the_working_directory_first(tmp_path, monkeypatch):
    assert package_data_root() == ROOT, "the checkout is its own source"
    monkeypatch.chdir(tmp_path)
    assert resolve_path("data/prompts.jsonl") == ROOT / "data" / "prompts.jsonl"
    (tmp_path / "data").mkdir()
    assert resolve_path("data/prompts.jsonl") == ROOT / "data" / "prompts.jsonl"
    (tmp_path / "data" / "prompts.jsonl").touch()
    assert resolve_path("data/prompts.jsonl") == Path("data/prompts.jsonl")


@pytest.mark.parametrize(
    "path", ["data", "data/none.jsonl", "prompts.jsonl", "align/cli.py", "data/../README.md", "forms/rules", "", "/data"]
)
def test_other_paths_stay_as_they_are(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_path(path) == Path(path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The files of a wheel, built from a copy of what an image or a source archive holds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(words, cwd=source, check=True, timeout=300, env={**os.environ, "PYTHONPATH": ""})
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture
def run_installed(installed, tmp_path):
    """Runs Python on the installed package, from a folder that has neither configs/ nor data/; returns what it prints."""

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, "-P", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_wheel_holds_every_shipped_file(installed):
    def listed(root):
        return {path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()}

    def files_of_the_app(root):
        kinds = (".py", ".js", ".css", ".html")
        return {path.relative_to(root) for path in (root / "annotation_ui").rglob("*") if path.suffix in kinds}

    assert files_of_the_app(installed) == files_of_the_app(ROOT)
    assert listed(installed / "align" / "_package_data") == listed(ROOT)
    assert len(listed(ROOT)) > 50


def test_the_wheel_is_what_runs_and_the_app_has_its_rule_sets(installed, run_installed):
    code = """
import align, annotation_ui
from annotation_ui.store.rule_sets import PACKAGE_RULE_SETS as folder
print(align.__file__, annotation_ui.__file__)
print(*sorted(path.stem for path in folder.glob("*.yaml")))
"""
    files, rules = run_installed("-c", code).splitlines()
    assert all(Path(file).is_relative_to(installed) for file in files.split())
    assert rules.split() == sorted(path.stem for path in (ROOT / "forms" / "rules").glob("*.yaml"))


@pytest.mark.slow
def test_the_installed_demo_app_and_rules_run_from_any_folder(run_installed, tmp_path):
    assert "usage: align annotate" in run_installed("-m", "align.cli", "annotate", "--help")
    run_installed("-m", "align.cli", "demo", "--model", "tiny-llama", "--output_dir", "demo")
    assert (tmp_path / "demo" / "report.html").is_file()
    row = {"prompt": "Hi", "responses": ["Hello", "Go away"], "model": ["a", "b"]}
    (tmp_path / "responses.jsonl").write_text(json.dumps(row) + "\n")
    verdict = json.dumps({"choices": [{"message": {"content": "VERDICT: KEEPS"}}]}).encode()
    with answering(lambda request: (200, verdict)) as url:
        words = ["--responses", "responses.jsonl", "--rules", "forms/rules/lamda-quality.yaml", "--output", "out"]
        run_installed("-m", "align.cli", "eval", "rules", *words, "--endpoint", f"{url}/v1", "--endpoint_model", "judge")
    assert "cites-a-source" in (tmp_path / "out" / "rules.json").read_text()
