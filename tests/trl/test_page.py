"""docs/migrate-from-trl.md names settings, defaults, metrics and members that exist, and leaves none of TRL's out."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import align.ppo.config
from align.trl import PPOConfig, PPOTrainer
from align.trl.hooks import STEP_METRICS
from align.trl.translation import SET_BY_TRAINER
from tests.trl.test_config import OWN
from tests.trl.test_trainer import METRICS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migrate-from-trl.md").read_text(encoding="utf-8")
VALUE = r"`(\w+)` \(`?(-?[\w.]+)`?\)"


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title):
    """The cells of the rows of a section's table, without the head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def defaults(settings):
    made = {item.name: item.default_factory() for item in fields(settings) if item.default_factory is not MISSING}
    return {item.name: item.default for item in fields(settings)} | made


def test_every_setting_of_trl_is_in_the_table():
    named = {name for row in rows("Settings") for name in re.findall(r"`(\w+)`", row[0])}
    assert OWN.keys() - SET_BY_TRAINER <= named
    assert named - defaults(PPOConfig).keys() == {"linear", "None", "True", "False", "k1"}


def test_defaults_in_the_table_are_those_of_the_code():
    for column, settings in ((0, PPOConfig), (1, align.ppo.config.PPOConfig)):
        known = defaults(settings)
        found = [pair for row in rows("Settings") for pair in re.findall(VALUE, row[column])]
        assert len(found) > 12
        for name, value in found:
            given = True if (name, column) == ("bf16", 0) else known[name]
            assert value == str(given) or float(value) == given, name


@pytest.mark.parametrize("title", ["From LLaMA-Factory's PPO", "From the loop `step(queries, responses, rewards)`"])
def test_settings_in_the_other_tables_exist(title):
    known = defaults(align.ppo.config.PPOConfig)
    theirs = {"batch_size", "mini_batch_size", "steps"}
    named = {name for row in rows(title) for name in re.findall(r"`(\w+)`", row[1])}
    assert len(named) > 5
    assert named - theirs - known.keys() == set()


def test_every_metric_of_trl_is_in_the_table():
    named = {name for row in rows("Metrics") for name in re.findall(r"`([\w/]+)`", row[0])}
    assert METRICS - {"step", "epoch"} <= named
    ours = {name for row in rows("Metrics") for name in re.findall(r"`(\w+/\w+)`", row[1])}
    assert [
        name for name in sorted(ours | set(STEP_METRICS.values())) if name not in (DOCS / "metrics.md").read_text()
    ] == []


def test_members_of_the_trainer_exist(make_trainer):
    text = section("Arguments of the trainer")
    listed = re.findall(r"`([\w.]+)`", text[text.index("Attributes:") :])
    trainer = make_trainer()
    for name in listed:
        owner = trainer
        for part in name.split("."):
            assert hasattr(owner, part), name
            owner = getattr(owner, part)
    assert {name for name in vars(PPOTrainer) if not name.startswith("_")} <= {*listed, *dir(object)} | {
        "is_world_process_zero",
        "is_local_process_zero",
    }
