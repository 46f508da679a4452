"""What README promises is there: its commands parse, its files exist, its examples of data are read."""

import json
import re
from pathlib import Path

import pytest

from align.cli import COMMANDS
from align.core.settings_parser import parse
from align.data.readers import read_records
from align.data.records import Demonstration, Prompt, Ranking
from align.dpo import DPOConfig
from align.ppo import PPOConfig
from align.reward import RewardConfig
from align.sft import SFTConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "dpo": DPOConfig}
STAGE_COMMANDS = re.findall(r"align(?:/| )(sft|reward|ppo|dpo)(?:/train\.py)? --config (\S+?\.yaml)([^`\n]*)", README)


def test_readme_names_a_command_for_each_stage() -> None:
    assert {stage for stage, _, _ in STAGE_COMMANDS} == set(STAGES)


@pytest.mark.parametrize(("stage", "file", "more"), STAGE_COMMANDS)
def test_every_stage_command_parses(stage: str, file: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(STAGES[stage], ["--config", file, *more.split()])


def test_every_align_command_exists() -> None:
    named = set(re.findall(r"`align ([a-z]+)", README))
    assert named
    assert named <= set(COMMANDS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^ {4}make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_linked_and_listed_paths_exist() -> None:
    paths = re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", README) + re.findall(
        r"^ {4}(\w+/(?:\w+/)*) ", README, flags=re.MULTILINE
    )
    paths += re.findall(r"--config_file (\S+)", README)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_examples_of_data_are_read(tmp_path: Path) -> None:
    rows = [json.loads(line.strip()) for line in README.splitlines() if line.startswith('    {"')]
    kinds = {"completion": Demonstration, "messages": Demonstration, "responses": Ranking, "chosen": Ranking}
    for row in rows:
        kind = next((kinds[key] for key in row if key in kinds), Prompt)
        (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
        assert len(read_records(str(tmp_path / "one.jsonl"), kind)) == 1
    assert len(rows) == 5
