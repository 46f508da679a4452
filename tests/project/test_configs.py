"""Every file under configs/: it parses, what it names is there, and the three stages of a model fit together."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from align.builtin.zoo import list_builtin
from align.core.settings_parser import parse
from align.dpo import DPOConfig
from align.extras.distill import DistillConfig
from align.ppo import PPOConfig
from align.reward import RewardConfig
from align.sft import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}
UNTESTED = ("llama-7b-lora", "t5-3b")
"""Sizes that never ran; their files are in configs/untested."""
NAMES = ("tiny-llama", "smollm2-135m", "gpt2", "t5-small", *UNTESTED)
HUB = {
    "gpt2": "openai-community/gpt2",
    "llama-7b-lora": "meta-llama/Llama-2-7b-hf",
    "t5-small": "google-t5/t5-small",
    "t5-3b": "google-t5/t5-3b",
}
LAUNCHERS = {"one-process", "cpu2", "ddp", "zero1", "zero2", "zero3", "zero3-offload", "two-nodes"}
SMALL = ("tiny-llama", "smollm2-135m")
ALL_STAGES = STAGES | {"dpo": DPOConfig, "distill": DistillConfig}
FILES = [(stage, name) for stage in ALL_STAGES for name in (NAMES if stage in STAGES else SMALL)]
each_stage = pytest.mark.parametrize("stage", ALL_STAGES)
each_file = pytest.mark.parametrize(("stage", "name"), FILES)
each_name = pytest.mark.parametrize("name", NAMES)


def path_of(stage, name):
    return (CONFIGS / "untested" if name in UNTESTED else CONFIGS) / stage / f"{name}.yaml"


def settings(stage, name):
    return parse(ALL_STAGES[stage], ["--config", str(path_of(stage, name))])


@each_stage
def test_the_files_are_these(stage):
    folders = [CONFIGS / stage, CONFIGS / "untested" / stage]
    found = {path.stem for folder in folders if folder.is_dir() for path in folder.iterdir()}
    assert found == {name for of, name in FILES if of == stage}


@each_file
def test_every_value_arrives(stage, name):
    """What the file says is what the dataclass holds: no key is lost, no number becomes text (YAML reads 1e-3 as text)."""
    config = settings(stage, name)
    for key, value in yaml.safe_load(path_of(stage, name).read_text()).items():
        assert getattr(config, key) == value, key
        assert type(getattr(config, key)) is type(value), key


@each_file
def test_every_value_differs_from_its_default(stage, name):
    """A file holds decisions. Names of models and data are written out even where they are the default."""
    config = ALL_STAGES[stage](**({"reward_model": "x"} if stage == "ppo" else {}))
    written = yaml.safe_load(path_of(stage, name).read_text())
    repeated = [key for key, value in written.items() if getattr(config, key) == value]
    assert set(repeated) <= {"model", "train_data", "prompts"}, repeated


@each_file
def test_the_data_is_there(stage, name):
    config = settings(stage, name)
    sources = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name in ("train_data", "validation_data", "demonstrations", "prompts", "validation_prompts")
    }
    expected = {"sft": 2, "reward": 3, "ppo": 2, "dpo": 2, "distill": 2}[stage]
    assert len(sources) == expected
    for source in sources.values():
        assert (ROOT / source).is_file(), source
    held_out = [source for key, source in sources.items() if key.startswith("validation")]
    assert all("heldout" in source for source in held_out)


@each_name
def test_the_stages_are_chained(name):
    sft, reward, ppo = (settings(stage, name) for stage in STAGES)
    assert [config.output_dir for config in (sft, reward, ppo)] == [f"runs/{name}/{stage}" for stage in STAGES]
    assert sft.model == HUB.get(name, name)
    assert sft.model in list_builtin() or sft.model in HUB.values()
    assert reward.model == ppo.model == f"{sft.output_dir}/model"
    assert ppo.reward_model == f"{reward.output_dir}/model"


@pytest.mark.parametrize("name", SMALL)
def test_dpo_starts_from_the_fine_tuned_model_and_has_the_reward_models_rankings(name):
    dpo, reward = settings("dpo", name), settings("reward", name)
    assert dpo.output_dir == f"runs/{name}/dpo"
    assert (dpo.model, dpo.train_data, dpo.validation_data) == (reward.model, reward.train_data, reward.validation_data)


@pytest.mark.parametrize("name", SMALL)
def test_the_policy_is_the_teacher_that_is_distilled(name):
    distill, ppo = settings("distill", name), settings("ppo", name)
    assert distill.output_dir == f"runs/{name}/distill"
    assert distill.model == f"{ppo.output_dir}/model"


def test_the_7b_fits_one_gpu():
    for stage in STAGES:
        config = settings(stage, "llama-7b-lora")
        assert (config.lora_rank, config.gradient_checkpointing, config.dtype) == (16, True, "bfloat16")
        assert settings(stage, "t5-3b").optimizer == "adafactor"


# ------------------------------------------------------------------------------------------------------------ launchers


def launched(name):
    """The arguments that `accelerate launch --config_file X script.py` works with."""
    words = ["--config_file", str(CONFIGS / "accelerate" / f"{name}.yaml"), "align/ppo/train.py"]
    return _validate_launch_command(launch_command_parser().parse_args(words))[0]


@pytest.mark.parametrize(
    ("name", "processes", "machines", "cpu", "zero", "several_processes"),
    [
        ("one-process", 1, 1, False, None, False),
        ("cpu2", 2, 1, True, None, True),
        ("ddp", 8, 1, False, None, True),
        ("zero1", 8, 1, False, 1, False),
        ("zero2", 8, 1, False, 2, False),
        ("zero3", 8, 1, False, 3, False),
        ("zero3-offload", 8, 1, False, 3, False),
        ("two-nodes", 16, 2, False, 3, False),
    ],
)
def test_what_is_launched(name, processes, machines, cpu, zero, several_processes):
    found = launched(name)  # an unknown key is an error there
    assert (found.num_processes, found.num_machines, bool(found.use_cpu)) == (processes, machines, cpu)
    assert (bool(found.use_deepspeed), bool(found.multi_gpu)) == (zero is not None, several_processes)
    assert found.machine_rank == 0
    if zero:
        offload = "cpu" if name == "zero3-offload" else "none"
        assert (found.zero_stage, str(found.zero3_init_flag).lower()) == (zero, "false")
        assert (found.offload_optimizer_device or "none", found.offload_param_device or "none") == (offload, offload)
        # What a run fills in (align.runtime.distributed) is left open.
        assert found.gradient_accumulation_steps is found.gradient_clipping is found.deepspeed_config_file is None
        assert (zero == 3) == (str(found.zero3_save_16bit_model).lower() == "true")
    assert {path.stem for path in (CONFIGS / "accelerate").iterdir()} == LAUNCHERS


def test_two_nodes_meet_at_one_address():
    found = launched("two-nodes")
    assert found.main_process_ip
    assert found.main_process_port == 29500
    assert found.deepspeed_multinode_launcher == "standard"


# ---------------------------------------------------------------------------------------------------------- rule models


@pytest.mark.parametrize("name", ["tiny-llama", "smollm2-135m"])
def test_configs_of_rule_models(name):
    """Every value arrives and is a decision, data and rules are there, and the model is what SFT leaves."""
    from align.data.readers import read_records
    from align.data.records import RuleJudgment
    from align.data.rules import read_rules
    from align.extras.rules import RuleConfig

    path = CONFIGS / "rule-model" / f"{name}.yaml"
    config, written = parse(RuleConfig, ["--config", str(path)]), yaml.safe_load(path.read_text())
    assert {key: getattr(config, key) for key in written} == written
    assert {key for key in written if getattr(RuleConfig(), key) == written[key]} <= {"train_data"}
    assert config.model == f"{settings('sft', name).output_dir}/model"
    assert config.output_dir == f"runs/{name}/rules"
    judged = {record.rule for record in read_records(ROOT / config.train_data, RuleJudgment)}
    assert judged == set(read_rules(config.rules))


# ------------------------------------------------------------------------------------------------------ attribute models


@pytest.mark.parametrize("name", ["tiny-llama", "smollm2-135m", "smollm2-135m-generative"])
def test_configs_of_attribute_models(name):
    """Every value arrives and is a decision, the data is there and rates the heads, and the model is what SFT leaves."""
    from align.data.readers import read_records
    from align.data.records import AttributeJudgment, Ranking
    from align.extras.attributes import AttributeConfig

    path, model = CONFIGS / "attributes" / f"{name}.yaml", name.removesuffix("-generative")
    config, written = parse(AttributeConfig, ["--config", str(path)]), yaml.safe_load(path.read_text())
    assert {key: getattr(config, key) for key in written} == written
    assert not [key for key in written if getattr(AttributeConfig(), key) == written[key]]
    assert config.model == f"{settings('sft', model).output_dir}/model"
    assert config.output_dir == f"runs/{model}/attributes{name.removeprefix(model)}"
    for source in (config.train_data, config.validation_data):
        assert all(set(config.heads) <= set(row.attributes) for row in read_records(ROOT / source, AttributeJudgment))
    assert not config.rankings or read_records(ROOT / config.rankings, Ranking)


@pytest.mark.parametrize(
    ("name", "source", "rows"),
    [("attributes", "rankings_round2", 100), ("attributes_heldout", "rankings_round2_heldout", None)],
)
def test_the_shipped_attributes_are_what_the_app_makes_of_the_rankings(name, source, rows):
    from annotation_ui.attribute_rows import attribute_rows

    def read(file):
        return [json.loads(line) for line in (ROOT / "data" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()]

    assert read(name) == [row for judgment in read(source)[:rows] for row in attribute_rows([judgment])]
