from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, ScriptArguments

import align.trl
from align.trl import PPOConfig
from align.trl.arguments import (
    SAME,
    SCRIPT_SETTINGS,
    SET_BY_TRAINER,
    UNSUPPORTED,
    core_config,
    number_format_hint,
    unsupported_settings,
)
from align.trl.config import InvalidArgumentError, set_batch_sizes, stop_token_of

OWN = {
    "dataset_num_proc": None,
    "num_mini_batches": 1,
    "total_episodes": None,
    "local_rollout_forward_batch_size": 64,
    "num_sample_generations": 10,
    "response_length": 53,
    "stop_token": None,
    "stop_token_id": None,
    "temperature": 0.7,
    "missing_eos_penalty": None,
    "sft_model_path": "EleutherAI/pythia-160m",
    "reward_model_path": "EleutherAI/pythia-160m",
    "model_adapter_name": None,
    "ref_adapter_name": None,
    "num_ppo_epochs": 4,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
    "ds3_gather_for_generation": True,
    **dict.fromkeys(["world_size", "num_total_batches", "micro_batch_size", "local_batch_size", "batch_size"]),
    **dict.fromkeys(["local_mini_batch_size", "mini_batch_size"]),
}
CHANGED = {"learning_rate": 3e-6, "logging_steps": 10, "gradient_checkpointing": True}


def names(settings):
    return {item.name for item in fields(settings)}


def made(**settings):
    args = PPOConfig(output_dir="out", **settings)
    set_batch_sizes(args, rows=100, processes=1)
    return args


def test_fields_and_defaults_are_those_of_trl():
    args = PPOConfig(output_dir="out")
    assert len(OWN) == 31
    assert names(PPOConfig) - names(TrainingArguments) == OWN.keys()
    assert {name: getattr(args, name) for name in OWN | CHANGED} == OWN | CHANGED
    assert PPOConfig(output_dir="out", use_cpu=True).bf16
    assert not PPOConfig(output_dir="out", use_cpu=True, fp16=True).bf16
    assert not PPOConfig(output_dir="out", use_cpu=True, bf16=False).bf16


def test_a_scripts_parser_takes_all_three_dataclasses():
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    words = "--dataset_name d --output_dir o --stop_token eos --kl_estimator k3 --no_gradient_checkpointing --use_peft"
    script, args, model = parser.parse_args_into_dataclasses(words.split())
    assert (script.dataset_name, model.use_peft) == ("d", True)
    assert (args.stop_token, args.kl_estimator, args.gradient_checkpointing) == ("eos", "k3", False)
    assert "--missing_eos_penalty" in parser.format_help()


READ_ELSEWHERE = {"bf16", "gradient_checkpointing", "gradient_checkpointing_kwargs"}
"""Read when the settings are made; transformers copies the latter two to settings of other names."""
READ_BY_CALLBACKS = {"run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}


def test_every_setting_is_read_or_its_lack_of_effect_is_named():
    groups = [SAME, SCRIPT_SETTINGS, SET_BY_TRAINER, UNSUPPORTED.keys(), READ_ELSEWHERE, READ_BY_CALLBACKS]
    named = set().union(*groups)
    assert named <= names(PPOConfig)
    assert sum(map(len, groups)) == len(named)
    text = "".join(path.read_text() for path in Path(align.trl.__file__).parent.glob("*.py"))
    assert [name for name in names(PPOConfig) - named if f"args.{name}" not in text and name != "warmup_steps"] == []
    assert "args.get_warmup_steps(" in text


VALUES = {
    **{"seed": 5, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7, "max_grad_norm": 0.0},
    **{"temperature": 0.3, "gamma": 0.9, "lam": 0.8, "num_ppo_epochs": 3, "num_mini_batches": 4, "kl_coef": 0.2},
    **{"kl_estimator": "k3", "cliprange": 0.3, "vf_coef": 0.5, "whiten_rewards": True},
}


def test_settings_of_the_same_name_keep_their_values():
    assert VALUES.keys() == set(SAME)
    config = core_config(made(**VALUES), longest_prompt=20, stop_ids=[])
    assert {name: getattr(config, name) for name in SAME} == VALUES


TRANSLATED = [
    ({}, "output_dir", "out/align"),
    ({"learning_rate": 0.0}, "learning_rate", 1e-30),
    ({"learning_rate": 2e-5}, "learning_rate", 2e-5),
    ({"optim": "adafactor"}, "optimizer", "adafactor"),
    ({}, "optimizer", "adamw"),
    ({}, "adam_epsilon", 1e-8),
    ({"ddp_timeout": 60}, "collective_timeout", 60.0),
    ({"ddp_timeout": 10**6}, "collective_timeout", 86400.0),
    ({}, "gradient_checkpointing", True),
    ({"gradient_checkpointing": False}, "gradient_checkpointing", False),
    ({"activation_checkpointing": False}, "gradient_checkpointing", False),
    ({"response_length": 7}, "max_new_tokens", 7),
    ({"total_episodes": 33}, "total_updates", 5),
    ({"num_train_epochs": 0.5}, "total_updates", 7),
    ({}, "kl_in", "reward"),
    ({"cliprange_value": 0.4}, "cliprange_value", 0.4),
    ({"cliprange_value": 0.0}, "cliprange_value", 1e-30),
    ({"missing_eos_penalty": 1.0}, "missing_eos_penalty", None),
    ({}, "missing_eos_score", None),
    ({}, "ignore_eos", True),
    ({}, "stop_token_ids", []),
    ({}, "max_prompt_tokens", 20),
    ({"resume_from_checkpoint": "true"}, "resume_from_checkpoint", True),
    ({"resume_from_checkpoint": True}, "resume_from_checkpoint", True),
    ({"resume_from_checkpoint": "o/checkpoint-12"}, "resume_from_checkpoint", "o/align/checkpoints/update-000012"),
    ({"resume_from_checkpoint": "elsewhere"}, "resume_from_checkpoint", "elsewhere"),
    ({}, "resume_from_checkpoint", False),
    ({"per_device_train_batch_size": 2, "response_length": 30}, "micro_batch_tokens", 100),
    ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, "rollout_batch_size", 6),
    ({}, "save_steps", 500),
    ({"save_steps": 0.25, "total_episodes": 80}, "save_steps", 3),
    ({"save_strategy": "no"}, "save_steps", 0),
    ({"save_only_model": True}, "save_steps", 0),
    ({"save_total_limit": 3}, "save_total_limit", 3),
    ({}, "save_total_limit", 0),
    ({}, "critic", "separate"),
    ({}, "chat_template", "raw"),
    ({}, "report_to", ["none"]),
]


@pytest.mark.parametrize(("settings", "name", "value"), TRANSLATED)
def test_settings_become_those_of_this_library(settings, name, value):
    assert getattr(core_config(made(**settings), longest_prompt=20, stop_ids=[]), name) == value


def test_stop_tokens():
    config = core_config(made(), longest_prompt=20, stop_ids=[0])
    assert (config.stop_token_ids, config.ignore_eos) == ([0], False)
    assert stop_token_of(PPOConfig(output_dir="o"), 7) is None
    assert stop_token_of(PPOConfig(output_dir="o", stop_token="eos"), 7) == 7
    assert stop_token_of(PPOConfig(output_dir="o", stop_token_id=0), 7) == 0
    for name, eos, message in (
        ("period", 7, "Unknown `stop_token` 'period'"),
        ("eos", None, "no EOS token: set stop_token_id"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            stop_token_of(PPOConfig(output_dir="o", stop_token=name), eos)


def test_sizes_follow_trl():
    args = made(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_mini_batches=2, num_train_epochs=2.0)
    assert (args.total_episodes, args.local_batch_size, args.batch_size, args.micro_batch_size) == (200, 12, 12, 4)
    assert (args.local_mini_batch_size, args.mini_batch_size, args.num_total_batches) == (6, 6, 17)
    args = PPOConfig(output_dir="out", per_device_train_batch_size=4, total_episodes=10)
    set_batch_sizes(args, rows=100, processes=2)
    assert (args.world_size, args.batch_size, args.micro_batch_size, args.num_total_batches) == (2, 8, 8, 2)


def test_defaults_and_script_settings_give_no_warning():
    assert unsupported_settings(PPOConfig(output_dir="o")) == []
    quiet = {"eval_strategy": "steps", "use_cpu": True, "sft_model_path": "a", "dataset_num_proc": 2, "do_train": True}
    assert unsupported_settings(PPOConfig(output_dir="o", **quiet)) == []
    done = {"logging_steps": 1, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "hub_private_repo": True}
    assert unsupported_settings(PPOConfig(output_dir="o", **done)) == []
    (line,) = unsupported_settings(PPOConfig(output_dir="o", gradient_checkpointing_kwargs={"use_reentrant": True}))
    assert line.startswith("activation_checkpointing_kwargs is {'use_reentrant': True} and has no effect")


WITHOUT_EFFECT = {
    "max_steps": 5,
    "local_rollout_forward_batch_size": 8,
    "fp16": True,
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "ds3_gather_for_generation": False,
    "logging_steps": 3,
    "load_best_model_at_end": True,
    "hub_private_repo": False,
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_one_line(name):
    more = (
        {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 500} if name == "load_best_model_at_end" else {}
    )
    lines = unsupported_settings(PPOConfig(output_dir="o", **{name: WITHOUT_EFFECT[name]} | more))
    (line,) = [line for line in lines if line.startswith(f"{name} is")]
    assert UNSUPPORTED[name] in line
    assert "\n" not in line


def test_the_models_decide_the_number_format():
    args, gpu = PPOConfig(output_dir="o", use_cpu=True), torch.device("cuda")
    (line,) = number_format_hint(args, torch.float32, gpu)
    assert "load them with dtype=torch.bfloat16" in line
    assert number_format_hint(args, torch.bfloat16, gpu) == []
    assert number_format_hint(args, torch.float32, torch.device("cpu")) == []
    assert number_format_hint(PPOConfig(output_dir="o", bf16=False), torch.float32, gpu) == []
    given, processor = PPOConfig(output_dir="o", use_cpu=True, bf16=True), torch.device("cpu")
    assert number_format_hint(given, torch.float32, processor) == [line]
    assert number_format_hint(given, torch.bfloat16, processor) == []


def test_values_without_a_counterpart_and_out_of_range_are_one_line():
    (line,) = unsupported_settings(PPOConfig(output_dir="o", save_strategy="epoch"))
    assert line == "save_strategy is 'epoch' and has no effect: use 'steps' and save_steps"
    (line,) = unsupported_settings(PPOConfig(output_dir="o", optim="sgd"))
    assert line.startswith("optim is ")
    with pytest.raises(ValueError, match=r"max_new_tokens is 0, but must be above 0 \(docs/migrate-from-trl.md lists"):
        core_config(made(response_length=0), longest_prompt=20, stop_ids=[])


def test_a_deepspeed_file_is_answered_with_the_launcher():
    with pytest.raises(InvalidArgumentError, match="`deepspeed`: start the script by `accelerate launch --config_file`"):
        PPOConfig(output_dir="o", deepspeed="zero2.json")
