"""The JSON Schemas of settings: current, named in every shipped file, and as strict as the settings themselves."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from align import cli
from align.commands.tools import schema_files
from align.core.errors import UserError
from align.core.settings_parser import parse

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "schema"
NOT_SETTINGS = {"accelerate", "cluster", "lm-eval"}
"""Folders of files that other programs read."""
FILES = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.relative_to(ROOT).parts[1] not in NOT_SETTINGS]
WRITTEN = schema_files(cli.stages_with_settings())


class Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as editors do by YAML 1.2."""


NUMBER = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789."))


def test_the_files_are_current():
    stale = [name for name, text in WRITTEN.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text]
    assert stale == [], "run: align schema --all configs/schema"
    assert {path.name for path in FOLDER.iterdir()} == set(WRITTEN)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_each_shipped_file_names_its_schema_and_obeys_it(path):
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    assert found, "the first line names no schema"
    schema = (path.parent / found[1]).resolve()
    assert schema.parent == FOLDER
    Draft7Validator.check_schema(json.loads(schema.read_text()))
    errors = Draft7Validator(json.loads(schema.read_text())).iter_errors(yaml.load(path.read_text(), Loader))
    assert [error.message for error in errors] == []
    command = next(name for name in cli.stages_with_settings() if name.replace(" ", "-") == schema.stem)
    models = ["--models", "tiny-gpt2"] if command == "eval all" else []
    parse(cli.stages_with_settings()[command].load()[0], ["--config", str(path), *models])  # it is that of the right command


@pytest.mark.parametrize(
    ("settings", "valid"),
    [
        ({"learning_rate": 1e-5, "ptx": {"data": "x"}, "report_to": "none", "reward_model": ["a", "b"]}, True),
        ({"missing_eos_score": None, "resume_from_checkpoint": "auto", "vllm": {"importance_cap": 0}, "prompts": 7}, True),
        ({"learning_rat": 1e-5}, False),
        ({"learning_rate": 0}, False),  # a limit that a base class declares
        ({"vllm": {"importance_cap": 0.5}}, False),
        ({"report_to": "tensorbord"}, False),
        ({"ptx": {"dat": "x"}}, False),
        ({"whiten_rewards": "maybe"}, False),
        ({"total_updates": 1.5}, False),
    ],
    ids=str,
)
def test_an_editor_refuses_what_a_run_refuses(settings, valid, tmp_path):
    assert Draft7Validator(json.loads(WRITTEN["ppo.json"])).is_valid(settings) == valid
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
    config = cli.stages_with_settings()["ppo"].load()[0]
    with nullcontext() if valid else pytest.raises(UserError):
        parse(config, ["--config", str(tmp_path / "a.yaml")])
