"""Pushes to a server that stands in for the hub: which files arrive, without local paths, and what a failure leaves."""

import json
import re

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from align import cli
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.models.checkpoint import push_model, without_paths
from align.models.loading import load
from tests.files import ROOT, write_rows

CONFIG_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": f"{i}?", "completion": "yes"} for i in range(8)]
    write_rows(tmp_path / "demonstrations.jsonl", rows)
    return tmp_path / "demonstrations.jsonl"


def train(data, output, *words):
    settings = ["--model", "tiny-llama", "--train_data", str(data), "--validation_data", "", "--output_dir", str(output)]
    cli.main(["sft", *settings, "--batch_size", "4", "--report_to", "none", "--dtype", "float32", *words])


@pytest.fixture
def model(data, tmp_path):
    """The folder of a trained model."""
    train(data, tmp_path / "run")
    return tmp_path / "run" / "model"


def require_public(files, *local):
    """No text file names a path of this machine, and the card is one that the hub takes."""
    for name, content in files.items():
        for path in (*local, ROOT, "/tmp"):
            assert str(path).encode() not in content, (name, path)
    card = ModelCard(files["README.md"].decode())
    head = card.data.to_dict()
    assert head["library_name"] in ("transformers", "peft")
    assert all(re.fullmatch(r"[\w.-]+", tag) for tag in head["tags"])
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", head.get("base_model", "a/b"))
    assert yaml.safe_load(files["README.md"].decode().split("---\n")[1]) == head


def test_a_stage_pushes_its_final_model(hub, data, tmp_path, capsys):
    train(data, tmp_path / "run", "--push_to_hub", "ann/moons")
    ((repo, files, summary),) = hub.commits
    assert (repo, hub.repos, summary) == ("ann/moons", {"ann/moons": True}, "Upload Supervised fine-tuned model")
    assert files.keys() >= {*CONFIG_FILES, "model.safetensors", "README.md"}
    folder = tmp_path / "run" / "model"
    assert all(content == (folder / name).read_bytes() for name, content in files.items())
    assert "| data | demonstrations.jsonl |" in files["README.md"].decode()
    require_public(files, tmp_path)
    assert f"pushed to {hub.url}/ann/moons" in capsys.readouterr().err


def test_an_adapter_is_pushed_without_its_local_base(hub, data, tmp_path, capsys):
    train(data, tmp_path / "sft")
    train(data, tmp_path / "lora", "--model", str(tmp_path / "sft" / "model"), "--lora_r", "2")
    hub.repos["ann/moons"] = False
    cli.main(["model", "push", str(tmp_path / "lora"), "ann/moons"])
    output = capsys.readouterr()
    assert output.out == f"{hub.url}/ann/moons\n"
    assert "is not on the hub; a user of the adapter needs it too" in output.err
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] is None
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= hub.files.keys()
    require_public(hub.files, tmp_path)
    stored = json.loads((tmp_path / "lora" / "model" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(tmp_path / "sft" / "model"), "on this machine it still loads"


def test_other_files_of_the_folder_stay_and_further_chat_templates_are_pushed(hub, model):
    for name in ("optimizer.pt", "notes.md", "training_args.bin", "events.out"):
        (model / name).write_text("secret")
    (model / "checkpoint-1").mkdir()
    (model / "checkpoint-1" / "config.json").write_text("{}")
    cli.main(["model", "push", str(model.parent), "ann/moons"])
    assert hub.repos == {"ann/moons": True}
    assert all(b"secret" not in content for content in hub.files.values())
    assert all("/" not in name for name in hub.files)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    tokenizer.save_pretrained(model)
    push_model(model, "ann/moons", "again")
    assert hub.commits[-1][1]["additional_chat_templates/tool_use.jinja"] == b"{{ 2 }}"


def test_a_base_that_is_no_hub_name_is_removed_from_a_card(hub, tmp_path, model):
    card = model / "README.md"
    card.write_text(card.read_text().replace("library_name", f"base_model: {tmp_path}\nlibrary_name", 1))
    push_model(model, "ann/moons")
    require_public(hub.files, tmp_path)
    card.write_text("---\na: [1\n---\n# x")
    with pytest.raises(UserError, match=r"README.md: its metadata cannot be read \(.*; repair the block at its top"):
        push_model(model, "ann/moons")


def test_a_failed_push_loses_nothing(hub, data, tmp_path, capsys):
    hub.refuses = "/commit/"
    train(data, tmp_path / "run", "--push_to_hub", "ann/moons")
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: hub"))
    assert "'ann/moons' was not updated" in line
    command = f"align model push {tmp_path / 'run' / 'model'} ann/moons"
    assert line.endswith(f"repeat with: {command}")
    load(ModelConfig(model=str(tmp_path / "run")), torch.float32)
    hub.refuses = ""
    cli.main(command.split()[1:])
    assert hub.commits[-1][0] == "ann/moons"


def test_a_hub_that_refuses_ends_a_run_before_it_starts(hub, data, tmp_path, command_error):
    hub.refuses = "/repos/create"
    line = command_error(train, data, tmp_path / "run", "--push_to_hub", "ann/moons")
    assert "error: hub: cannot create 'ann/moons'" in line
    assert "log in with `hf auth login`" in line
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model", "push", "/nowhere", "ann/moons"], "/nowhere: holds neither config.json nor adapter_config.json"),
        (["model", "push", "x", "moons"], "'moons' is not a valid Hub repository"),
        (["sft", "--push_to_hub", "moons"], "push_to_hub is 'moons', but must be"),
    ],
)
def test_wrong_names_are_one_line(words, line, command_error):
    assert line in command_error(cli.main, words)


def test_names_lose_their_folders(tmp_path):
    (tmp_path / "a.jsonl").touch()
    assert without_paths(f"{tmp_path}/a.jsonl,/far/b.jsonl") == "a.jsonl, b.jsonl"
    assert without_paths("/runs/sft/model") == "sft"
    assert without_paths("12,345 of 67,890") == "12,345 of 67,890"
    assert without_paths("Anthropic/hh-rlhf") == "Anthropic/hh-rlhf"


@pytest.mark.slow
def test_a_reward_model_and_a_policy_are_pushed_by_their_stages(hub, tmp_path):
    rows = [{"prompt": f"{i}?", "responses": ["yes", "no"], "ranks": [1, 2]} for i in range(8)]
    write_rows(tmp_path / "rankings.jsonl", rows)
    shared = ["--model", "tiny-llama", "--report_to", "none", "--dtype", "float32", "--push_to_hub", "ann/moons"]
    ranked = ["--train_data", str(tmp_path / "rankings.jsonl"), "--validation_data", "", "--batch_size", "4"]
    cli.main(["reward", *shared, *ranked, "--demonstrations", "", "--output_dir", str(tmp_path / "reward")])
    assert {"reward.json", "reward_head.safetensors", "model.safetensors"} <= hub.files.keys()
    require_public(hub.files, tmp_path)
    cli.main(["dpo", *shared, *ranked, "--output_dir", str(tmp_path / "dpo")])
    require_public(hub.files, tmp_path)
    prompts = ["--prompts", str(tmp_path / "rankings.jsonl"), "--validation_prompts", "", "--total_updates", "1"]
    sizes = ["--rollout_batch_size", "4", "--max_new_tokens", "4", "--output_dir", str(tmp_path / "ppo")]
    cli.main(["ppo", *shared, *prompts, *sizes, "--reward_model", str(tmp_path / "reward")])
    require_public(hub.files, tmp_path)
    assert "| reward model | reward |" in hub.files["README.md"].decode()
    assert [name for name, *_ in hub.commits] == ["ann/moons"] * 3
