import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry.registry import resolve_model
from align.models.loading import load
from align.reward.checkpoint import load_head
from align.sft import SFTConfig
from align.training.memory import Memory
from tests.conftest import ROOT
from tests.refusals import refusal

TEMPLATES = {
    "syntax": "{% for m in messages %}{{ m.content }",
    "undefined name": "{{ nobody.nothing }}",
    "sandbox": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "missing loader": "{% include 'other.jinja' %}",
    "refusing": "{{ raise_exception('only one turn, please') }}",
    "division": "{{ 1 // 0 }}",
}
CONFIGS = {
    "zero heads": {"n_head": 0},
    "width and heads": {"n_head": 7},
    "text for a number": {"n_layer": "two"},
    "list for a number": {"n_embd": [64]},
    "null": {"vocab_size": None},
    "no vocabulary": {"vocab_size": 0},
    "negative layers": {"n_layer": -1},
    "unknown type": {"model_type": "no-such-model"},
    "type is a number": {"model_type": 3},
    "millions of layers": {"n_layer": 5_000_000},
    "unknown activation": {"activation_function": "square root of a cat"},
}
ADAPTERS = {
    "list": [],
    "base is a number": {"base_model_name_or_path": 3},
    "unknown type": {"peft_type": "NO_SUCH_TYPE"},
    "no type": {"peft_type": None},
    "rank zero": {"r": 0},
    "rank is a text": {"r": "four"},
    "targets are a number": {"target_modules": 4},
}


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(resolve_model("tiny-gpt2"), tmp_path / "model"))


@pytest.fixture
def adapter(model, tmp_path):
    """A new adapter on that model, with PEFT's files."""
    folder = tmp_path / "adapter"
    loaded = load(ModelConfig(model=str(model), lora_r=4), torch.float32)
    loaded.backbone.peft.save_pretrained(folder, selected_adapters=["policy"])
    for path in (folder / "policy").iterdir():
        path.rename(folder / path.name)
    loaded.tokenization.tokenizer.save_pretrained(folder)
    return folder


def refused(folder, **settings):
    """The line that loading a folder ends with."""
    return refusal(load, ModelConfig(model=str(folder), **settings), torch.float32)


def change(path, changes):
    changed = json.loads(path.read_text()) | changes if isinstance(changes, dict) else changes
    path.write_text(json.dumps(changed))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_broken_chat_template(kind, model, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATES[kind])
    assert "the chat template fails for a conversation of user (" in refused(model, chat_template=str(path))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_broken_config(kind, model):
    change(model / "config.json", CONFIGS[kind])
    assert str(model) in refused(model)
    if kind == "millions of layers":  # the memory check ends at once
        config = SFTConfig(model=str(model), output_dir="run")
        with pytest.raises(UserError, match="num_hidden_layers 5000000, but a model has 1 to"):
            Memory(Accelerator(cpu=True), config, config).check_before_load()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_broken_adapter_config(kind, adapter):
    change(adapter / "adapter_config.json", ADAPTERS[kind])
    assert str(adapter) in refused(adapter)


def test_an_index_without_rows(model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text("{}")
    assert "its weights cannot be loaded" in refused(model)


def spoil(path, part, value):
    """Write `value` into one number of the weight whose name ends in `part`."""
    weights = load_file(path)
    name = next(name for name in sorted(weights) if name.endswith(part))
    weights[name].view(-1)[1] = value
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_or_an_adapter_with_nan_is_named_with_its_weight(value, model, adapter):
    spoil(adapter / "adapter_model.safetensors", "lora_A.weight", value)
    line = refused(adapter)
    assert line.startswith(f"adapter '{adapter}': its weight '")
    assert "holds NaN" in line
    spoil(model / "model.safetensors", "h.1.mlp.c_fc.weight", value)
    line = refused(model)
    assert line.startswith(f"model '{model}': its weight 'transformer.h.1.mlp.c_fc.weight' holds NaN or infinite numbers")


def test_a_reward_head_with_nan_is_named(tmp_path):
    save_file({"weight": torch.tensor([[1.0, math.nan]])}, tmp_path / "reward_head.safetensors")
    (tmp_path / "reward.json").write_text('{"mean": 0.5}')
    with pytest.raises(UserError, match=r"reward_head\.safetensors or reward\.json holds NaN"):
        load_head(str(tmp_path), load(ModelConfig(model="tiny-gpt2"), torch.float32).backbone)


def test_a_template_of_this_repository_still_renders():
    template = ROOT / "configs/demo/smollm2-135m/chat.jinja"
    assert load(ModelConfig(model="tiny-gpt2", chat_template=str(template)), torch.float32).tokenization.end_id
