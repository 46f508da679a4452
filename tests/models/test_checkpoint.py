import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry import registry
from align.model_registry.registry import published_name, resolve_model
from align.models import checkpoint
from align.models.adapters import add_adapter, copy_adapter
from align.models.checkpoint import save_model, save_model_into, weights_of
from align.models.folders import base_of, load_weights
from align.models.heads import LanguageModel, ScalarHead
from align.models.loading import from_objects, load
from align.models.roles import ActorCritic
from tests.models.adapters import PROMPT, PROMPTS, RESPONSE, RESPONSES, logits_of
from tests.refusals import refusal

CARD = {"title": "A model", "stage": "sft", "data": "some.jsonl"}


def auto(name):
    return AutoModelForSeq2SeqLM if name == "tiny-t5" else AutoModelForCausalLM


@torch.no_grad()
def plain_logits(model, name, row):
    """The logits of a transformers model for a response and the token after it: [T+1, V]."""
    prompt, response = torch.tensor([PROMPTS[row]]), torch.tensor([RESPONSES[row]])
    if name == "tiny-t5":
        start = torch.tensor([[model.config.decoder_start_token_id]])
        return model(input_ids=prompt, decoder_input_ids=torch.cat([start, response], dim=1)).logits[0]
    return model(input_ids=torch.cat([prompt, response], dim=1)).logits[0, len(PROMPTS[row]) - 1 :]


def assert_same_logits(model, name, expected):
    for row in range(2):
        found = plain_logits(model, name, row)
        torch.testing.assert_close(found, expected[row, : len(found)], atol=1e-5, rtol=0)


def changed(loaded):
    """The model after something like training: no weight is that of its folder."""
    with torch.no_grad():
        for weight in loaded.backbone.model.parameters():
            if weight.requires_grad:
                weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)))
    return loaded


def test_a_saved_policy_loads_in_transformers_beside_its_tokenizer_settings_and_card(
    tiny_name, load_sharp, sharp_backbones, tmp_path
):
    loaded = changed(load_sharp(tiny_name))
    # Out of a larger module's state, as an optimization hands it over.
    module = ActorCritic(loaded.backbone, None, ScalarHead(loaded.backbone.hidden_size))
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone, module.state_dict()), CARD)
    theirs = auto(tiny_name).from_pretrained(tmp_path / "model").eval()
    expected = logits_of(loaded)
    assert_same_logits(theirs, tiny_name, expected)
    again = load(ModelConfig(model=str(tmp_path / "model")), torch.float32)
    assert torch.equal(logits_of(again), expected)
    before = sharp_backbones[tiny_name]
    assert (before.logits(before.hidden(PROMPT, RESPONSE)) - expected).abs().max() > 0.1
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == loaded.tokenization.tokenizer.chat_template
    settings = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (settings.eos_token_id, settings.pad_token_id) == ([1], 0)
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| data | some.jsonl |" in card


def test_a_saved_adapter_loads_in_peft_with_equal_logits(tiny_name, load_sharp, sharp_folders, tmp_path):
    loaded = load_sharp(tiny_name, lora_r=4)
    state = LanguageModel(loaded.backbone, "policy").state_dict()
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone, state), CARD)
    expected = logits_of(loaded)
    base = auto(tiny_name).from_pretrained(sharp_folders[tiny_name])
    assert_same_logits(PeftModel.from_pretrained(base, tmp_path / "model").eval(), tiny_name, expected)
    auto_peft = AutoPeftModelForSeq2SeqLM if tiny_name == "tiny-t5" else AutoPeftModelForCausalLM
    assert_same_logits(auto_peft.from_pretrained(tmp_path / "model").eval(), tiny_name, expected)
    again = load(ModelConfig(model=str(tmp_path / "model"), lora_r=4), torch.float32)
    torch.testing.assert_close(logits_of(again), expected, atol=1e-6, rtol=0)
    stored = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in stored)
    assert not (tmp_path / "model" / "model.safetensors").exists()
    assert "library_name: peft" in (tmp_path / "model" / "README.md").read_text()


def test_an_adapter_is_merged_where_all_weights_are_to_be_trained(tiny_name, load_sharp, tmp_path):
    loaded = load_sharp(tiny_name, lora_r=4)
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone), CARD)
    merged = load(ModelConfig(model=str(tmp_path / "model")), torch.float32)
    assert merged.adapter is None
    assert all(weight.requires_grad for weight in merged.backbone.model.parameters())
    torch.testing.assert_close(logits_of(merged), logits_of(loaded), atol=1e-4, rtol=0)
    save_model(tmp_path / "whole", merged, weights_of(merged.backbone), CARD)
    theirs = auto(tiny_name).from_pretrained(tmp_path / "whole").eval()
    assert_same_logits(theirs, tiny_name, logits_of(merged))


@pytest.fixture
def adapter_folder(load_sharp, tmp_path):
    loaded = load_sharp("tiny-llama", lora_r=4)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    return tmp_path / "adapter"


def refusal_to_load(folder):
    line = refusal(load, ModelConfig(model=str(folder), lora_r=4), torch.float32)
    assert str(folder) in line
    return line


def change_settings(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def cut_file(folder, name="adapter_model"):
    path = folder / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_file(folder, name="adapter_model", pickle="adapter_model"):
    path = folder / f"{name}.safetensors"
    torch.save(load_file(path), folder / f"{pickle}.bin")
    path.unlink()


FAULTS = {
    "cut off": cut_file,
    "no file": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "a pickle": pickle_file,
    "too few tensors": lambda folder: change_tensors(folder, lambda stored: dict(list(stored.items())[:-1])),
    "no tensor": lambda folder: change_tensors(folder, lambda stored: {}),
    "other names": lambda folder: change_tensors(folder, lambda stored: {f"other.{key}": w for key, w in stored.items()}),
    "another shape": lambda folder: change_settings(folder, r=8),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_adapter_is_refused(adapter_folder, fault):
    FAULTS[fault](adapter_folder)
    refusal_to_load(adapter_folder)


def test_an_adapter_of_another_model_is_refused(adapter_folder, sharp_folders):
    change_settings(adapter_folder, base_model_name_or_path=sharp_folders["tiny-t5"])
    refusal_to_load(adapter_folder)


@pytest.mark.parametrize(("fault", "names"), [(pickle_file, ("model", "pytorch_model")), (cut_file, ("model",))])
def test_broken_weights_are_refused(tiny_name, fault, names, sharp_folders, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(sharp_folders[tiny_name], folder)
    fault(folder, *names)
    assert str(folder) in refusal(load_weights, str(folder), torch.float32)


def test_an_adapter_without_weights_is_not_saved(load_sharp, tmp_path):
    loaded = load_sharp("tiny-gpt2", lora_r=4)
    bare = {name: weight for name, weight in weights_of(loaded.backbone).items() if "lora" not in name}
    with pytest.raises(UserError, match=r"^adapter 'policy' holds no weights: nothing was saved$"):
        save_model(tmp_path / "model", loaded, bare, CARD)
    assert list(tmp_path.iterdir()) == []


# Cards and adapter configs name models by what they are called everywhere; adapters find their base here all the same.

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


def test_a_folder_that_a_model_is_saved_into_is_new_as_a_whole_and_keeps_other_files(load_sharp, tmp_path, monkeypatch):
    loaded, folder = load_sharp("tiny-llama"), tmp_path / "checkpoint-3"
    given = (folder, loaded, weights_of(loaded.backbone), CARD)

    def fail(*_):
        raise UserError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "require_equal_on_disk", fail)
        with pytest.raises(UserError, match="full"):
            save_model_into(*given)
    assert not folder.exists()
    names = save_model_into(*given)
    assert names == {path.name for path in folder.iterdir()}
    (folder / "notes.txt").write_text("mine")
    assert save_model_into(*given) == names
    assert {path.name for path in folder.iterdir()} == {*names, "notes.txt"}
