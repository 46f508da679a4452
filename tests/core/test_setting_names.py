from dataclasses import replace

import pytest

from align.cli import stage_configs
from align.core.setting_names import NAMES
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
    assert [each.name for each in NAMES].count(other.name) == 1, "no name stands for two things"


@pytest.mark.parametrize(
    ("config", "words", "line"),
    [
        (PPOConfig, "--response-length 5", "option --response_length: TRL's `response_length` is `max_new_tokens` here"),
        (PPOConfig, "--max_epochs 2", "OpenRLHF's `max_epochs` is `num_ppo_epochs` here"),
        (SFTConfig, "--max_epochs 2", "OpenRLHF's `max_epochs` is `num_train_epochs` here"),
        (PPOConfig, "--rollout.batch_size 8", "`rollout_batch_size` here (it counts responses: prompts x"),
        (SFTConfig, "--max_length 9", "is `max_prompt_tokens`, `max_response_tokens` here (a limit each)"),
        (PPOConfig, "--logging_steps 8", "TRL's `logging_steps` is no setting here: each update is logged"),
        (PPOConfig, "algorithm.kl_ctrl.kl_coef=1", "verl's `algorithm.kl_ctrl.kl_coef` is `kl_coef` here; settings"),
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
    assert unknown == ["unknown setting zzqq", "help(PPOConfig) lists the valid names"]
    assert refusal(replace, SFTConfig(), sed=1) == "unknown setting sed; did you mean seed?"
    block = {"early_stopping": 3}
    assert "unknown setting selection.early_stopping; did you mean selection.early_stop" in refusal(
        PPOConfig, selection=block
    )
