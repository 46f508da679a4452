"""Values of settings set in Python and in YAML: types, paths, the user's home, and what a message names."""

import json
from pathlib import Path

import pytest

from align.builtin.zoo import resolve_model
from align.commands.launch import main as launch
from align.commands.sample import SampleConfig
from align.core.errors import UserError
from align.core.files import is_shipped, resolve_path
from align.core.launch import run_stage
from align.core.settings_parser import parse
from align.eval.toxicity.task import ToxicityConfig
from align.ppo import PPOConfig
from align.ppo.trainer import split_rewards
from align.sft import SFTConfig, SFTTrainer


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return str(tmp_path)


def test_the_home_folder_is_expanded_in_every_path(home, tmp_path):
    config = PPOConfig(output_dir="~/x", model="~/m", prompts="~/p.jsonl", reward_models=["~/a", "~/b"], ptx_data="~")
    assert (config.output_dir, config.model, config.prompts) == (f"{home}/x", f"{home}/m", f"{home}/p.jsonl")
    assert config.reward_models == [f"{home}/a", f"{home}/b"]
    assert config.ptx_data == home
    assert parse(SFTConfig, ["--output_dir=~/y"]).output_dir == f"{home}/y"
    (tmp_path / "c.yaml").write_text("output_dir: ~/z\n")
    assert parse(SFTConfig, ["--config", str(tmp_path / "c.yaml")]).output_dir == f"{home}/z"
    assert ToxicityConfig(models=["m"], scorer="model:~/clf").scorer == f"model:{home}/clf"
    assert SampleConfig(model="m", output="~/o.jsonl", instruction="~ means home", shots=1).output == f"{home}/o.jsonl"
    assert SampleConfig(model="m", output="o.jsonl", instruction="~/ is home", shots=1).instruction == "~/ is home"
    assert str(resolve_path("~nobody-of-this-name/x")) == "~nobody-of-this-name/x"


def test_path_objects_are_settings():
    config = SFTConfig(output_dir=Path("runs/x"), model=Path("m"), train_data=Path("d.jsonl"))
    assert (config.output_dir, config.model, config.train_data) == ("runs/x", "m", "d.jsonl")
    config.output_dir = Path("runs/y")
    assert config.output_dir == "runs/y"


def test_path_objects_are_arguments_of_trainers(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "Hi", "completion": "Hello."}) + "\n")
    model = Path(resolve_model("tiny-gpt2"))
    config = SFTConfig(output_dir=tmp_path / "run", log_to="none", dtype="float32")
    trainer = SFTTrainer(model, tmp_path / "d.jsonl", config, validation_data=tmp_path / "d.jsonl")
    assert len(trainer.task.held_out) == 1
    assert trainer.config.train_data == str(tmp_path / "d.jsonl")
    assert trainer.run.config.model == str(model)
    trainer.run.close()


def test_a_path_among_rewards_is_a_reward_model():
    models, functions = split_rewards([Path("runs/reward"), len])
    assert models == ["runs/reward"]
    assert [function.name for function in functions] == ["len"]


def test_one_value_of_a_list_may_stand_alone():
    assert SFTConfig(log_to="none").log_to == ["none"]
    assert PPOConfig(reward_models=Path("a")).reward_models == ["a"]
    with pytest.raises(UserError, match="log_to is \\['nothing'\\], but must be one of tensorboard, wandb, trackio, none"):
        SFTConfig(log_to="nothing")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"updates": "3"}, "updates is '3' \\(str\\), but must be a whole number"),
        ({"updates": 3.5}, "updates is 3.5 \\(float\\), but must be a whole number"),
        ({"updates": True}, "updates is True \\(bool\\), but must be a whole number"),
        ({"gamma": "1"}, "gamma is '1' \\(str\\), but must be a number"),
        ({"resume": "no"}, "resume is 'no' \\(str\\), but must be true or false"),
        ({"model": 3}, "model is 3 \\(int\\), but must be text or a path"),
        ({"reward_models": [1]}, "reward_models is 1 \\(int\\), but must be text or a path"),
        ({"schedule": "cosin"}, "schedule is 'cosin', but must be one of cosine, linear, inverse_sqrt, constant"),
    ],
)
def test_a_value_of_another_type_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nepochs: three\n", ":2: epochs: invalid int value: 'three'"),
        ("seed: 1\n\nbatch_size: x\n", ":3: batch_size: invalid int value: 'x'"),
        ("schedule: cosin\n", ":1: schedule: invalid choice: 'cosin'"),
    ],
)
def test_a_wrong_type_in_a_file_names_line_and_key_once(tmp_path, text, line):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        parse(SFTConfig, ["--config", str(path)])
    assert str(error.value).startswith(f"{path}{line}")


def test_a_word_too_many_is_named_with_its_option():
    with pytest.raises(UserError, match="unexpected word 'b' after --model, which takes one value"):
        parse(SampleConfig, ["--model", "a", "b"])
    with pytest.raises(UserError, match="unexpected word 'a'; settings are given as --name value"):
        parse(SampleConfig, ["a"])


@pytest.mark.parametrize("left", [{"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "0"}])
def test_variables_of_a_launcher_that_is_gone_are_one_line(left, monkeypatch, capsys):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        run_stage(SFTConfig, lambda config: None, [])
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"unset {' '.join(sorted(left, key=['WORLD_SIZE', 'RANK', 'LOCAL_RANK'].index))} for one process" in lines[0]


def test_accelerates_file_of_a_newer_version_is_one_line(tmp_path):
    path = tmp_path / "newer.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nquantum_mode: true\n"
    )
    with pytest.raises(UserError, match=r"newer.yaml had unknown keys \(\['quantum_mode'\]\); remove them"):
        launch(["--config_file", str(path), "align/sft/train.py"])


def test_which_files_are_the_projects_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_shipped("data/prompts_heldout.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts_heldout.jsonl").write_text("{}")
    assert not is_shipped("data/prompts_heldout.jsonl")
    assert not is_shipped("none.jsonl")
