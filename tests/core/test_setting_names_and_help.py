from dataclasses import fields, replace

import pytest

from align.cli import OTHER_STAGES, TRAINING_STAGES, stage_configs
from align.core.setting_names import NAMES
from align.core.settings_parser import BASIC, FEW, help_text, parse, setting_names
from align.dpo import DPOConfig
from align.eval import TASKS
from align.ppo import PPOConfig
from align.sft import SFTConfig
from tests.refusals import refusal

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
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    shown = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    assert set(shown) <= set(setting_names(config))
    if name in TRAINING_STAGES:
        assert 10 <= len(shown) <= 15, shown
        assert f"align {name} --help-all` for all {len(all_of(config))} settings" in " ".join(text.split())
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


KNOWN = {name: setting_names(config) for name, config in stage_configs().items()}


@pytest.mark.parametrize("other", NAMES, ids=lambda other: f"{other.source}-{other.name}")
def test_each_alternative_exists_in_a_stage_that_does_not_have_the_name_itself(other):
    for names in other.here:
        assert any(set(names) <= set(known) and other.name not in known for known in KNOWN.values()), names
    assert all(other.here) or other.note
    assert [each.name for each in NAMES].count(other.name) == 1, "no name stands for two things"


@pytest.mark.parametrize(
    ("config", "words", "line"),
    [
        (PPOConfig, "--response-length 5", "option --response_length: TRL's `response_length` is `max_new_tokens` here"),
        (PPOConfig, "--max_steps 2", "TRL's `max_steps` is `total_updates` here"),
        (SFTConfig, "--max_steps 2", "TRL's `max_steps` is `num_train_epochs` here"),
        (SFTConfig, "--max_length 9", "is `max_prompt_tokens`, `max_response_tokens` here"),
        (PPOConfig, "--logging_steps 8", "TRL's `logging_steps`"),
        (SFTConfig, "--total_updates 5", "another stage's `total_updates` is `num_train_epochs` here"),
        (SFTConfig, "--reward_functions a:b", "option --reward_functions; see --help-all"),
        (DPOConfig, "--init_kl_coef 0.1", "unknown option --init_kl_coef; "),  # DPO has no KL penalty
        (
            PPOConfig,
            "--init_kl_coef 0.1 --sed 1",
            "option --init_kl_coef: TRL's `init_kl_coef` is `kl_coef` here; unknown option --sed; did you mean --seed?",
        ),
    ],
)
def test_an_unknown_option_is_answered_with_the_name_to_use(config, words, line):
    assert line in refusal(parse, config, words.split())


def test_every_unknown_key_of_a_file_is_named_at_once(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("epsilon: 0.1\nrollout: {batch_size: 8}\nsed: 2\n")
    foreign, block, wrong = refusal(parse, PPOConfig, ["--config", str(path)]).split(f"; {path}:")
    assert foreign == f"{path}:1: unknown key 'epsilon': TRL's `epsilon` is `cliprange` here"
    assert block.startswith("2: unknown key 'rollout")
    assert wrong == "3: unknown key 'sed'; did you mean seed?"


def test_an_unknown_argument_in_python_is_answered_too():
    foreign, *unknown = refusal(PPOConfig, response_length=5, zzqq=1).split("; ")
    assert foreign == "unknown setting response_length: TRL's `response_length` is `max_new_tokens` here"
    assert unknown[0] == "unknown setting zzqq"
    assert "help(PPOConfig)" in unknown[1]
    assert refusal(replace, SFTConfig(), sed=1) == "unknown setting sed; did you mean seed?"
    block = {"early_stopping": 3}
    assert "unknown setting selection.early_stopping; did you mean selection.early_stop" in refusal(
        PPOConfig, selection=block
    )
