import json
import math
import os
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from align.commands.sample import SampleConfig
from align.commands.tools import launch_processes as launch
from align.core.errors import UserError
from align.core.files import resolve_path
from align.core.launch import _check_launcher_variables, run_stage
from align.core.settings import Range, dump
from align.core.settings_parser import parse
from align.dpo import DPOConfig
from align.eval.toxicity import ToxicityConfig
from align.model_registry.registry import resolve_model
from align.ppo import PPOConfig, run_ppo
from align.ppo.trainer import split_rewards
from align.reward import RewardConfig
from align.sft import SFTConfig, SFTTrainer
from tests.core.reading import STAGES, MixSettings, WithBlock, refused


def make(stage, **values):
    """A config with what its stage cannot do without."""
    needed = {"reward_functions": ["a:f"]} if stage is PPOConfig else {}
    return stage(**(needed | values))


def test_the_home_folder_is_expanded_in_every_path_and_in_no_text(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = str(tmp_path)
    config = PPOConfig(output_dir="~/x", model="~/m", reward_model=["~/a", "~/b"], ptx={"data": "~"})
    assert (config.output_dir, config.model, config.ptx.data) == (f"{home}/x", f"{home}/m", home)
    assert config.reward_model == [f"{home}/a", f"{home}/b"]
    assert parse(SFTConfig, ["--output_dir=~/y"]).output_dir == f"{home}/y"
    (tmp_path / "c.yaml").write_text("output_dir: ~/z\n")
    assert parse(SFTConfig, ["--config", str(tmp_path / "c.yaml")]).output_dir == f"{home}/z"
    assert ToxicityConfig(models=["m"], scorer="model:~/clf").scorer == f"model:{home}/clf"
    assert SampleConfig(model="m", output="o.jsonl", instruction="~/ is home", num_few_shot=1).instruction == "~/ is home"
    assert str(resolve_path("~nobody-of-this-name/x")) == "~nobody-of-this-name/x"


def test_path_objects_are_settings_and_one_value_of_a_list_may_stand_alone():
    config = SFTConfig(output_dir=Path("runs/x"), model=Path("m"), report_to="none")
    assert (config.output_dir, config.model, config.report_to) == ("runs/x", "m", ["none"])
    config.output_dir = Path("runs/y")
    assert config.output_dir == "runs/y"
    assert PPOConfig(reward_model=Path("a")).reward_model == ["a"]
    models, functions = split_rewards([Path("runs/reward"), len])
    assert models == ["runs/reward"]
    assert [function.name for function in functions] == ["len"]


def test_path_objects_are_arguments_of_trainers(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "Hi", "completion": "Hello."}) + "\n")
    model = Path(resolve_model("tiny-gpt2"))
    config = SFTConfig(output_dir=tmp_path / "run", report_to="none", dtype="float32")
    trainer = SFTTrainer(model, tmp_path / "d.jsonl", config, validation_data=tmp_path / "d.jsonl")
    assert len(trainer.held_out) == 1
    assert trainer.config.train_data == str(tmp_path / "d.jsonl")
    assert trainer.run.model_config.model == str(model)
    trainer.run.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_updates": "3"}, "total_updates is '3' \\(str\\)"),
        ({"total_updates": 3.5}, "total_updates is 3.5 \\(float\\)"),
        ({"total_updates": True}, "total_updates is True \\(bool\\)"),
        ({"gamma": "1"}, "gamma is '1' \\(str\\)"),
        ({"resume_from_checkpoint": 3}, "resume_from_checkpoint is 3 \\(int\\)"),
        ({"model": 3}, "model is 3 \\(int\\)"),
        ({"reward_model": [1]}, "reward_model is 1 \\(int\\)"),
        ({"output_dir": " "}, "output_dir is ' '"),
        ({"report_to": "nothing"}, "report_to is \\['nothing'\\], but must be one of tensorboard, wandb, trackio, none"),
        (
            {"lr_scheduler_type": "cosin"},
            "lr_scheduler_type is 'cosin', but must be one of cosine, linear, inverse_sqrt, truncated_rsqrt, constant",
        ),
    ],
)
def test_a_value_of_another_type_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    ("limits", "words", "good", "bad"),
    [
        ({}, "a finite number", [0, -1.5, 1e300], [math.nan, math.inf, -math.inf]),
        ({"gt": 0}, "above 0", [1e-9], [0, -1e-5, math.nan, math.inf]),
        ({"ge": 0}, "0 or more", [0, 0.5], [-0.1]),
        ({"ge": 0, "lt": 1}, "at least 0 and below 1", [0, 0.99], [-0.1, 1]),
        ({"gt": 0, "le": 1}, "above 0 and at most 1", [0.1, 1], [0, 1.1]),
        ({"ge": 1, "le": 86_400}, "from 1 to 86,400", [1, 86_400], [0.9, 86_401]),
        ({"gt": 1, "off": 0}, "above 1, or 0", [0, 3], [1, 0.5, -1]),
        ({"choices": ("a", "b")}, "one of a, b", ["a", ["b", "a"], []], ["c", ["a", "c"]]),
        ({"required": True}, "set", ["x", [0]], ["", []]),
    ],
)
def test_limits_by_hand(limits, words, good, bad):
    found = Range(**limits)
    assert str(found) == words
    assert all(map(found.allow, good))
    assert not any(map(found.allow, bad))


ALL = [
    ("learning_rate", [0, -1e-5, math.nan, math.inf], [1e-9]),
    ("lora_r", [-1], [0, 8]),
    ("seed", [-1, 2**32], [0, 2**32 - 1]),
    ("report_to", [["tensorbord"], ["wandb", "x"]], [["none"], ["wandb", "trackio"]]),
]
RANGES = {
    SFTConfig: [("prompt_loss_weight", [-0.1], [0.0, 0.5]), ("validation_split", [-0.1, 1.0], [0.0, 0.5])],
    RewardConfig: [("lm_loss_weight", [-0.01], [0.0])],
    DPOConfig: [("beta", [0.0, math.nan], [0.01]), ("label_smoothing", [-0.1, 0.5], [0.0, 0.49])],
    PPOConfig: [
        ("temperature", [0.0, -1.0], [0.7]),
        ("missing_eos_score", [math.nan], [-1.0, None]),
        ("missing_eos_penalty", [-1.0, math.nan], [None]),
        ("gamma", [-0.1, 1.1], [0.0, 1.0]),
        # Limits that follow from other settings: rollouts of 64 responses, 100 updates.
        ("samples_per_prompt", [0, 3, 128], [1, 4, 64]),
        ("num_mini_batches", [0, 65], [1, 64]),
        ("critic_warmup", [-1, 100], [0, 99]),
    ],
}
CASES = [(stage, *case) for stage in STAGES for case in ALL + RANGES[stage]]


@pytest.mark.parametrize(("stage", "name", "bad", "good"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_value_beyond_its_limits_is_refused_when_it_is_set(stage, name, bad, good):
    for value in bad:
        refused(lambda value=value: make(stage, **{name: value}), f"{name} is {value!r}, but must be")
    for value in good:
        assert getattr(make(stage, **{name: value}), name) == value
    config = make(stage)
    before = getattr(config, name)
    refused(lambda: setattr(config, name, bad[0]), f"{name} is {bad[0]!r}, but must be")
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"advantage_estimator": "rloo"}, ["samples_per_prompt is 1", "2 or more for advantage_estimator rloo"]),
        ({"length_adjustment": 0.5}, ["samples_per_prompt is 1", "2 or more for length_adjustment"]),
        (
            {"advantage_estimator": "grpo", "samples_per_prompt": 4, "critic": "separate"},
            ["critic is 'separate'", "has no critic"],
        ),
        ({"advantage_estimator": "reinforce++", "critic_warmup": 2}, ["critic_warmup is 2", "has no critic"]),
        ({"loss": "ipo", "label_smoothing": 0.1}, ["label_smoothing is 0.1", "0 for ipo"]),
        ({"kl_in": "loss"}, ["kl_estimator is 'k1'", "k2 or k3 with kl_in loss"]),
        ({"kl_coef": 0.0, "kl_target": 6.0}, ["kl_coef is 0.0", "above 0 with kl_target"]),
        ({"missing_eos_penalty": 1.0, "missing_eos_score": -1.0}, ["missing_eos_score is -1.0", "with missing_eos_penalty"]),
        *(
            (
                {"whiten_rewards": True, "advantage_estimator": name, "samples_per_prompt": 4},
                ["whiten_rewards is True", f"advantage_estimator {name}"],
            )
            for name in ("rloo", "grpo", "reinforce++")
        ),
    ],
)
def test_settings_that_exclude_each_other(values, parts):
    refused(lambda: make(DPOConfig if "loss" in values else PPOConfig, **values), *parts)


GROUPS = {"advantage_estimator": "rloo", "samples_per_prompt": 2}


@pytest.mark.parametrize(
    ("stage", "values", "ignored"),
    [
        (SFTConfig, {"adam_beta1": 0.5}, []),
        (SFTConfig, {"adam_beta1": 0.5, "optimizer": "adafactor"}, ["adam_beta1"]),
        (PPOConfig, {"gamma": 0.9, "lam": 0.5, "vf_coef": 0.5, "value_learning_rate": 1e-3, "value_fit": "first"}, []),
        (PPOConfig, {"vf_coef": 0.5}, ["vf_coef"]),
        (PPOConfig, {"vf_coef": 0.5, "critic": "separate"}, []),
        (PPOConfig, GROUPS, []),
        (PPOConfig, GROUPS | {"gamma": 0.9}, ["gamma"]),
        (PPOConfig, {"advantage_estimator": "reinforce++", "gamma": 0.9}, []),
        (PPOConfig, {"critic": "separate", "vf_coef": 0.0}, ["critic"]),
        (PPOConfig, {"reward_model": ["a"], "reward_ensemble": "uwo"}, ["reward_ensemble"]),
        (
            PPOConfig,
            {"reward_model": ["a", "b"], "uncertainty_weight": 1.0},
            ["uncertainty_weight"],
        ),
    ],
)
def test_settings_without_effect_are_named(stage, values, ignored):
    warning = make(stage, **values).without_effect_warning()
    assert re.findall(r"(\w+)=", warning) == ignored
    assert bool(warning) == bool(ignored)


def test_a_penalty_for_a_missing_end_switches_the_default_score_off():
    assert (make(PPOConfig).missing_eos_penalty, make(PPOConfig).missing_eos_score) == (None, -1.0)
    lowered = make(PPOConfig, missing_eos_penalty=2)
    assert (lowered.missing_eos_penalty, lowered.missing_eos_score) == (2.0, None)


def test_ppo_needs_a_reward(tmp_path):
    with pytest.raises(UserError, match=r"reward_model or reward_functions .*configs/ppo/first-run"):
        run_ppo(PPOConfig(output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        *map(make, STAGES),
        WithBlock(mix=MixSettings(data="x", weights=["a"], kind="packed", rows=2)),
        *(SFTConfig(model=text, learning_rate=1e-300) for text in ("", "null", "007", "1e3", "- a", "a: b # c", "é'\"\\ {")),
    ],
    ids=lambda one: f"{type(one).__name__} {getattr(one, 'model', '')}",
)
def test_dump_reads_back(config, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(dump(config))
    assert asdict(parse(type(config), ["--config", str(path)])) == asdict(config)
    assert set(yaml.safe_load(path.read_text())) == {item.name for item in fields(config)}


MET = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
LEFT_OVER = (
    *({"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "0"}),
    *({"PMI_SIZE": "4"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"MV2_COMM_WORLD_SIZE": "8"}),
    *({"ACCELERATE_USE_DEEPSPEED": "true"}, {"ACCELERATE_USE_FSDP": "true"}),
    *({"WORLD_SIZE": "two"}, {"PMI_SIZE": ""}, {"WORLD_SIZE": "2", "RANK": "2", **MET}),
    {"WORLD_SIZE": "2", "RANK": "0", **MET, "MASTER_PORT": "x"},
)


@pytest.mark.parametrize("left", LEFT_OVER, ids=str)
def test_variables_of_a_launcher_that_is_gone_are_one_line(left, monkeypatch, command_error):
    for name in {name for each in LEFT_OVER for name in each}:
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    lines = command_error(run_stage, SFTConfig, lambda config: None, ["--report_to", "none"]).splitlines()
    assert len(lines) == 1
    advised = lines[0].partition("unset ")[2].partition(" to run")[0].split()
    assert advised, "the line tells what to do"
    assert set(advised) <= left.keys()


def test_variables_of_a_complete_launch_are_accepted(monkeypatch):
    given = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "PMI_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true", **MET}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    _check_launcher_variables()


@pytest.mark.parametrize(("words", "several"), [("--cpu --num_processes 2", True), ("--cpu --num_processes 1", False)])
def test_align_launch_starts_as_many_processes_on_a_cpu_as_it_is_told(words, several, monkeypatch):
    """accelerate's --cpu starts one process, whatever --num_processes is."""
    given = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", given.append)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("signal.signal", lambda *_: None)
        launch([*words.split(), "align/sft/train.py"])
    (options,) = given
    assert (options.multi_gpu, options.cpu) == (several, not several)
    assert os.environ["ACCELERATE_USE_CPU"] == ("true" if several else "")


def test_accelerates_file_of_a_newer_version_is_one_line(tmp_path):
    path = tmp_path / "newer.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nquantum_mode: true\n"
    )
    with pytest.raises(UserError, match=r"newer.yaml had unknown keys \(\['quantum_mode'\]\); remove them"):
        launch(["--config_file", str(path), "align/sft/train.py"])
