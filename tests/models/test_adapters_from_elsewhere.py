"""Adapters of other shapes than ours, and settings that an adapter cannot take."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.checkpoint import save_model, weights_of
from align.models.configs import base_of
from align.models.loading import load
from align.models.roles import Role
from tests.models.adapters import CARD, PROMPT, RESPONSE


@torch.no_grad()
def test_an_adapter_on_the_vocabulary_matrix_does_not_reach_the_reference(load_sharp, make_ppo, sharp_backbones):
    loaded = load_sharp("tiny-llama", lora_rank=2, lora_targets="q_proj,lm_head")
    module = make_ppo(loaded).optimization.module
    base = make_ppo(load_sharp("tiny-llama")).optimization.module
    expected = base("language", PROMPT, RESPONSE)
    torch.testing.assert_close(module(Role.REFERENCE, PROMPT, RESPONSE), expected, atol=1e-6, rtol=0)
    assert (module(Role.LANGUAGE_MODEL, PROMPT, RESPONSE) - expected).abs().max() > 0.01


@pytest.fixture
def foreign_adapter(sharp_folders, tmp_path):
    """An adapter of plain PEFT with a vocabulary matrix of its own and dropout; the model it was saved from."""
    base = AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-llama"])
    targets = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    settings = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.5, **targets)
    theirs = get_peft_model(base, settings)
    with torch.no_grad():
        theirs.base_model.model.lm_head.modules_to_save["default"].weight.mul_(0.5)
    theirs.save_pretrained(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(sharp_folders["tiny-llama"]) / name, tmp_path / "adapter")
    return str(tmp_path / "adapter"), theirs.eval()


@torch.no_grad()
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_with_whole_modules_of_its_own_is_switched_with_them(foreign_adapter, checkpointing):
    """PEFT's `modules_to_save` keeps whole matrices in an adapter: the base must be read without them."""
    folder, theirs = foreign_adapter
    lora = {"lora_rank": 2, "lora_alpha": 8, "lora_targets": "q_proj"}
    loaded = load(ModelConfig(model=folder, gradient_checkpointing=checkpointing, **lora), torch.float32)
    ids = torch.tensor([[9, 10, 11, 20, 21]])
    with theirs.disable_adapter():
        bare = theirs(ids).logits
    assert (theirs(ids).logits - bare).abs().max() > 0.5
    for adapter, logits in {"start": theirs(ids).logits, "policy": theirs(ids).logits, None: bare}.items():
        with loaded.backbone.adapter(adapter):
            hidden = loaded.backbone.hidden(Padded.from_lists([[9, 10, 11]]), Padded.from_lists([[20, 21]]))
            found = loaded.backbone.logits(hidden)
        torch.testing.assert_close(found[0], logits[0, 2:], atol=1e-5, rtol=0)


def test_an_adapter_finds_its_base_from_any_working_directory(tmp_path, monkeypatch):
    """A run names its base as it was given, `runs/sft/model`, seen from where it was started."""
    base, adapter = tmp_path / "here" / "runs" / "sft" / "model", tmp_path / "here" / "runs" / "reward" / "model"
    for folder in (base, adapter, tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "runs/sft/model"}')
    monkeypatch.chdir(tmp_path / "here")
    assert base_of("runs/reward/model") == ("runs/sft/model", True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert base_of("../here/runs/reward/model") == (str(base), True)


# ------------------------------------------------------------------------------------------------- settings of an adapter


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora_rank": 16},
            "is an adapter with lora_rank 4, which .*; lora_rank is 16: set it to 4, or set",
        ),
        ({"lora_rank": 4, "lora_alpha": 8.0}, "is an adapter with lora_alpha 32.0, .* lora_alpha is 8.0: set it to 32.0"),
        (
            {"lora_rank": 4, "lora_targets": "q_proj,v_proj"},
            "with lora_targets down_proj,.*q_proj.*, which .* is q_proj,v_proj",
        ),
    ],
    ids=["rank", "alpha", "targets"],
)
def test_lora_settings_that_an_adapter_cannot_take_are_refused(load_sharp, tmp_path, settings, message):
    """They were ignored, and config.yaml said what was not so."""
    loaded = load_sharp("tiny-llama", lora_rank=4)
    save_model(tmp_path / "sft", loaded, weights_of(loaded.backbone), CARD)
    load(ModelConfig(model=str(tmp_path / "sft"), lora_rank=4), torch.float32)
    with pytest.raises(UserError, match=message):
        load(ModelConfig(model=str(tmp_path / "sft"), **settings), torch.float32)


def test_an_adapter_on_few_modules_names_them_where_all_are_asked_for(foreign_adapter):
    folder, _ = foreign_adapter
    with pytest.raises(UserError, match=r"with lora_targets q_proj, .* lora_targets is all-linear: set it to q_proj"):
        load(ModelConfig(model=folder, lora_rank=2, lora_alpha=8), torch.float32)
