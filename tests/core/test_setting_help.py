from dataclasses import fields

import pytest

from align.cli import OTHER_STAGES, TRAINING_STAGES
from align.core.setting_help import BASIC, FEW, help_text
from align.core.settings_parser import parse, setting_names
from align.eval import TASKS
from align.ppo import PPOConfig
from align.sft import SFTConfig

STAGES = {**TRAINING_STAGES, **OTHER_STAGES, **{f"eval {name}": task for name, task in TASKS.items()}}


def all_of(config):
    """All settings without the blocks that hold some of them."""
    names = setting_names(config)
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


@pytest.mark.parametrize("name", STAGES)
def test_help_fits_on_a_page(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    config = STAGES[name].load()[0]
    text = help_text(config, f"align {name}", everything=False)
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    shown = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    assert set(shown) <= set(setting_names(config))
    if name in TRAINING_STAGES:
        assert 10 <= len(shown) <= 15, shown
        assert f"align {name} --help-all explains all {len(all_of(config))} settings" in " ".join(text.split())
    if len(all_of(config)) <= FEW:
        assert sorted(shown) == sorted(all_of(config))


@pytest.mark.parametrize("name", STAGES)
def test_all_settings_are_in_groups_and_explained(name):
    config = STAGES[name].load()[0]
    lines = help_text(config, f"align {name}", everything=True).splitlines()
    shown = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    assert sorted(shown) == sorted(all_of(config))
    text = "".join(lines).replace(" ", "").replace("-", "")  # lines may be broken at a hyphen
    for item in fields(config):
        help_of_item = item.metadata["help"]
        assert len(help_of_item) > 10
        assert help_of_item.replace(" ", "").replace("-", "") in text, item.name


def test_each_basic_setting_is_one_of_a_command():
    known = {name for stage in STAGES.values() for name in setting_names(stage.load()[0])}
    names = [name for group in BASIC.values() for name in group.split()]
    assert set(names) <= known
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--kl_coef", "1", "--help"], ["--config", "nowhere.yaml", "--help"]])
def test_help_comes_before_mistakes(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(PPOConfig, words, "align ppo")
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "\nalgorithm:\n  --kl_coef X " in printed
    assert "(default: 0.05)" in printed
    assert "--kl_horizon" not in printed


def test_overridden_settings_stay_in_their_group_with_the_default_of_the_stage(capsys):
    for config, default in ((PPOConfig, "3e-06"), (SFTConfig, "1e-05")):
        text = help_text(config, "align", everything=True)
        group = text[text.index("\noptimization:\n") :]
        assert f"(default: {default})" in group[: group.index("--lr_scheduler_type")]
