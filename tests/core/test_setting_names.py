"""Foreign names of settings: each names settings that exist, and an unknown option is answered with them."""

from dataclasses import replace

import pytest

from align.cli import stage_configs
from align.core.errors import UserError
from align.core.setting_names import NAMES, explain
from align.core.settings_parser import parse, setting_names
from align.dpo import DPOConfig
from align.ppo import PPOConfig
from align.sft import SFTConfig
from tests.refusals import refusal

KNOWN = {name: setting_names(config) for name, config in stage_configs().items()}


@pytest.mark.parametrize("other", NAMES, ids=lambda other: f"{other.source}-{other.name}")
def test_each_alternative_exists_in_a_stage_that_does_not_have_the_name_itself(other):
    for names in other.here:
        assert any(set(names) <= set(known) and other.name not in known for known in KNOWN.values()), names
    assert all(other.here) or other.note


def test_no_name_stands_for_two_things():
    assert len({other.name for other in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("config", "words", "line"),
    [
        (PPOConfig, "--response-length 5", "option --response_length: TRL's `response_length` is `max_new_tokens` here"),
        (PPOConfig, "--max_epochs 2", "OpenRLHF's `max_epochs` is `num_ppo_epochs` here"),
        (SFTConfig, "--max_epochs 2", "OpenRLHF's `max_epochs` is `num_train_epochs` here"),
        (PPOConfig, "--ppo_epochs 2", "TRL's `ppo_epochs` is `num_ppo_epochs` here"),
        (PPOConfig, "--num_episodes 2", "`total_updates` here (rollouts, not passes over the prompts)"),
        (PPOConfig, "--rollout.batch_size 8", "`rollout_batch_size` here (it counts responses: prompts x"),
        (
            SFTConfig,
            "--max_length 9",
            "is `max_prompt_tokens`, `max_response_tokens` here (a limit each)",
        ),
        (PPOConfig, "--eps_clip 0.1", "OpenRLHF's `eps_clip` is `cliprange` here"),
        (PPOConfig, "--mini_batch_size 8", "TRL's `mini_batch_size` is `num_mini_batches` here (a count: rollout"),
        (SFTConfig, "--per_device_train_batch_size 8", "is `batch_size` here (over all processes: per-device size x accum"),
        (PPOConfig, "--per_device_train_batch_size 8", "is `rollout_batch_size` here (over all processes: per-device size"),
        (PPOConfig, "--logging_steps 8", "TRL's `logging_steps` is no setting here: each update is logged"),
        (PPOConfig, "algorithm.kl_ctrl.kl_coef=1", "verl's `algorithm.kl_ctrl.kl_coef` is `kl_coef` here; settings"),
        (
            DPOConfig,
            "--input_key q",
            "`input_key` is `train_data` here (in brackets after the file: FILE[FIELD=COLUMN, ...])",
        ),
        (PPOConfig, "--input_key q", "OpenRLHF's `input_key` is `prompts` here (in brackets"),
        (DPOConfig, "--init_kl_coef 0.1", "unknown option --init_kl_coef; "),  # DPO has no KL penalty
    ],
)
def test_an_unknown_option_is_answered_with_the_name_to_use(config, words, line):
    assert line in refusal(parse, config, words.split())


def test_an_unknown_key_of_a_file_or_a_block_is_answered_too(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nrollout: {batch_size: 8}\n")
    with pytest.raises(UserError, match=r"a.yaml:2: unknown key 'rollout"):
        parse(PPOConfig, ["--config", str(tmp_path / "a.yaml")])
    with pytest.raises(UserError, match=r"unknown setting selection\.early_stopping; did you mean selection\.early_stop"):
        PPOConfig(selection={"early_stopping": 3})
    (tmp_path / "a.yaml").write_text("seed: 1\nhorizon: 5\n")
    with pytest.raises(UserError, match=r"a.yaml:2: unknown key 'horizon': TRL's `horizon` is `kl_horizon` here"):
        parse(PPOConfig, ["--config", str(tmp_path / "a.yaml")])


def test_every_unknown_option_or_key_is_named_at_once(tmp_path):
    foreign, *wrong = refusal(parse, PPOConfig, ["--init_kl_coef", "0.1", "--sed", "1"]).split("; ")
    assert foreign == "unknown option --init_kl_coef: TRL's `init_kl_coef` is `kl_coef` here"
    assert wrong == ["unknown option --sed", "did you mean --seed?"]
    path = tmp_path / "a.yaml"
    path.write_text("epsilon: 0.1\nseed: 1\nsed: 2\n")
    foreign, wrong = refusal(parse, PPOConfig, ["--config", str(path)]).split("; ", 1)
    assert foreign == f"{path}:1: unknown key 'epsilon': TRL's `epsilon` is `cliprange` here"
    assert wrong == f"{path}:3: unknown key 'sed'; did you mean seed?"


def test_an_unknown_argument_in_python_is_answered_too():
    foreign, *unknown = refusal(PPOConfig, response_length=5, zzqq=1).split("; ")
    assert foreign == "unknown setting response_length: TRL's `response_length` is `max_new_tokens` here"
    assert unknown == ["unknown setting zzqq", "help(PPOConfig) lists the valid names"]
    with pytest.raises(UserError, match="unknown setting sed; did you mean seed"):
        replace(SFTConfig(), sed=1)


def test_a_name_without_a_setting_in_the_stage_is_not_explained():
    assert explain("adap_kl_ctrl", ["beta"]) == ""
