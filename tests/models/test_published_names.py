"""Cards and adapter configs name models by what they are called everywhere; adapters find their base here all the same."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry import registry
from align.model_registry.registry import published_name, resolve_model
from align.models.adapters import add_adapter, copy_adapter
from align.models.checkpoint import save_model, weights_of
from align.models.configs import base_of
from align.models.loading import from_objects, load
from tests.models.adapters import CARD, PROMPT, RESPONSE, logits_of

PUBLISHED = "some-owner/tiny-llama"


@pytest.fixture(autouse=True)
def seeded():
    """The same weights in each run: some draws make states whose rounding exceeds the tolerance."""
    torch.manual_seed(0)


def save(loaded, folder):
    for name, weight in loaded.backbone.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    save_model(folder, loaded, weights_of(loaded.backbone), CARD)
    return folder


def head_of(folder):
    """The metadata that the hub reads."""
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def named_base(folder):
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.fixture
def published(monkeypatch):
    """A built-in model that was made from one on the hub, as smollm2-135m was. Nothing may be looked up there."""

    def refuse(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", refuse)
    changed = dataclasses.replace(registry._REGISTRY["tiny-llama"], published=PUBLISHED)
    monkeypatch.setitem(registry._REGISTRY, "tiny-llama", changed)


@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_built_in_model_has_the_name_of_the_published_one(lora_r, published, tmp_path):
    loaded = load(ModelConfig(model="tiny-llama", lora_r=lora_r), torch.float32)
    folder = save(loaded, tmp_path / "model")
    assert head_of(folder)["base_model"] == PUBLISHED
    for path in folder.iterdir():
        assert b"align-cache" not in path.read_bytes()
        assert str(resolve_model("tiny-llama")).encode() not in path.read_bytes()
    if lora_r:
        assert named_base(folder) == PUBLISHED
        assert base_of(str(folder)) == (str(resolve_model("tiny-llama")), True)  # not the hub's, whose weights may differ
    again = load(ModelConfig(model=str(folder), lora_r=lora_r), torch.float32)
    torch.testing.assert_close(logits_of(again), logits_of(loaded), atol=1e-6, rtol=0)
    continued = save(again, tmp_path / "continued")
    assert head_of(continued).get("base_model") == (PUBLISHED if lora_r else None)
    assert not lora_r or base_of(str(continued)) == (str(resolve_model("tiny-llama")), True)


def test_a_further_adapter_asks_nothing_of_the_hub(published, tmp_path):
    folder = save(load(ModelConfig(model="tiny-llama", lora_r=2), torch.float32), tmp_path / "model")
    loaded = load(ModelConfig(model="tiny-llama", lora_r=2), torch.float32)
    add_adapter(loaded.backbone, str(folder), "reward")
    copy_adapter(loaded.backbone.peft, "reward", "value")
    with loaded.backbone.adapter("value"):
        found = loaded.backbone.logits(loaded.backbone.hidden(PROMPT, RESPONSE))
    torch.testing.assert_close(found, logits_of(load(ModelConfig(model=str(folder)), torch.float32)), atol=1e-5, rtol=0)


def test_a_base_that_was_named_elsewhere_or_changed_by_hand_is_followed(published, sharp_folders, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": PUBLISHED}))
    assert base_of(str(tmp_path)) == (PUBLISHED, True)
    folder = save(load(ModelConfig(model="tiny-llama", lora_r=2), torch.float32), tmp_path / "model")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = sharp_folders["tiny-llama"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert base_of(str(folder)) == (sharp_folders["tiny-llama"], True)


def test_a_built_in_model_without_a_published_one_is_named_in_adapters_alone(tmp_path):
    folder = save(load(ModelConfig(model="tiny-llama", lora_r=2), torch.float32), tmp_path / "model")
    assert "base_model" not in head_of(folder)
    assert named_base(folder) == "tiny-llama"
    assert base_of(str(folder)) == (str(resolve_model("tiny-llama")), True)


def test_the_header_of_an_adapter_is_always_the_same(tmp_path):
    loaded = load(ModelConfig(model="tiny-llama", lora_r=2), torch.float32)
    files = [save(loaded, tmp_path / str(number)) / "adapter_model.safetensors" for number in range(8)]
    headers = {data[: 8 + int.from_bytes(data[:8], "little")] for data in map(Path.read_bytes, files)}
    assert len(headers) == 1


@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_local_folder_is_left_out_of_the_card_and_found_by_its_adapters(lora_r, sharp_folders, tmp_path):
    base = sharp_folders["tiny-llama"]
    loaded = load(ModelConfig(model=base, lora_r=lora_r), torch.float32)
    folder = save(loaded, tmp_path / "model")
    assert "base_model" not in head_of(folder)
    assert base not in (folder / "README.md").read_text()
    assert not lora_r or base_of(str(folder)) == (base, True)


def test_an_adapter_on_a_model_in_memory_names_no_base(sharp_folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-llama"])
    model.config.name_or_path = ""
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    folder = save(from_objects(model, tokenizer, ModelConfig(model="", lora_r=2)), tmp_path / "model")
    assert named_base(folder) is None
    assert "base_model" not in head_of(folder)
    with pytest.raises(UserError, match="base_model_name_or_path is empty"):
        load(ModelConfig(model=str(folder)), torch.float32)


def test_names_that_mean_the_same_everywhere(tmp_path, monkeypatch):
    assert published_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert published_name("openai-community/gpt2") == "openai-community/gpt2"
    assert published_name(str(tmp_path)) is None
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_name("runs/sft") is None
