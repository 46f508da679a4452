"""A model that passes the checks before training can be saved, and its files compute what was trained."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from align.core.errors import UserError
from align.core.files import read_json
from align.core.settings import ModelConfig
from align.model_registry.tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from align.models.checkpoint import merge_model, require_savable, save_model, weights_of
from align.models.loading import from_objects, load
from align.models.lora import LoraSettings
from tests.models.adapters import CARD, IDS

LAYERS = ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head")
WHOLE = ("embed_tokens", "lm_head", "norm", "o_proj")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def write_base(folder: Path, tied: bool, dtype: torch.dtype) -> None:
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES, **ids, tie_word_embeddings=tied)).to(dtype)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def moved(model: torch.nn.Module) -> None:
    """Change trained weights, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator).to(weight.dtype))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    targets=st.sets(st.sampled_from(LAYERS), min_size=1),
    whole=st.sets(st.sampled_from(WHOLE)),
    tied=st.booleans(),
    use_dora=st.booleans(),
    rows=st.sampled_from([VOCABULARY, VOCABULARY + 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_adapter_that_passes_the_checks_is_saved_and_read_as_trained(targets, whole, tied, use_dora, rows, dtype):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder / "base", tied, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
        if rows != VOCABULARY:
            model.resize_token_embeddings(rows)
            if not targets.isdisjoint(LAYERS[3:]) or not whole.isdisjoint(WHOLE[:2]):
                return  # its base must be saved first
        names = ",".join(sorted(targets))
        more = LoraSettings(modules_to_save=sorted(whole - targets), use_dora=use_dora)
        config = ModelConfig(model=str(folder / "base"), lora_r=2, lora_alpha=8, lora_target_modules=names, lora=more)
        try:
            loaded = from_objects(model, AutoTokenizer.from_pretrained(folder / "base"), config)
            require_savable(loaded)
        except UserError:
            event("refused")
            return
        event("saved")
        moved(loaded.backbone.model)
        save_model(folder / "adapter", loaded, weights_of(loaded.backbone), CARD)
        expected = logits(loaded.backbone.peft)
        close = {"atol": 1e-4 if dtype is torch.float32 else 0.1, "rtol": 0}
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
        if rows != VOCABULARY:
            base.resize_token_embeddings(rows)
        read = PeftModel.from_pretrained(base, folder / "adapter", autocast_adapter_dtype=False)
        torch.testing.assert_close(logits(read), expected, **close)
        if rows == VOCABULARY:
            try:
                merge_model(str(folder / "adapter"), folder / "merged")
            except UserError:
                event("not merged")
                return
            merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=dtype)
            torch.testing.assert_close(logits(merged), expected, **close)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_matrix_that_was_tied_in_memory_is_saved_whatever_the_config_says(tied, shared, tmp_path):
    write_base(tmp_path / "base", tied, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if shared:
        model.lm_head.weight = model.model.embed_tokens.weight
    loaded = from_objects(model, byte_tokenizer(), ModelConfig())
    require_savable(loaded)
    moved(model)
    save_model(tmp_path / "saved", loaded, weights_of(loaded.backbone), CARD)
    read = load(ModelConfig(model=str(tmp_path / "saved")), torch.float32).backbone.model
    torch.testing.assert_close(logits(read), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
def test_the_original_file_of_a_tokenizer_is_saved_with_the_model(name, adapter, tmp_path):
    write_base(tmp_path / "base", True, torch.float32)
    (tmp_path / "base" / name).write_bytes(b"pieces")
    loaded = load(ModelConfig(model=str(tmp_path / "base"), lora_r=2 if adapter else 0), torch.float32)
    save_model(tmp_path / "saved", loaded, weights_of(loaded.backbone), CARD)
    assert (tmp_path / "saved" / name).read_bytes() == b"pieces"
    again = load(ModelConfig(model=str(tmp_path / "saved"), lora_r=2 if adapter else 0), torch.float32)
    save_model(tmp_path / "again", again, weights_of(again.backbone), CARD)
    assert (tmp_path / "again" / name).read_bytes() == b"pieces", "a later stage loses it"


@pytest.mark.parametrize("left", [(), ("chat_template.jinja",), ("tokenizer_config.json",), ("README.md",)])
def test_an_adapter_without_tokenizer_files_uses_those_of_its_base(left, tmp_path):
    write_base(tmp_path / "base", True, torch.float32)
    loaded = load(ModelConfig(model=str(tmp_path / "base"), lora_r=2), torch.float32)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    for path in (tmp_path / "adapter").iterdir():
        if not path.name.startswith("adapter_") and path.name not in left:
            path.unlink()
    read = load(ModelConfig(model=str(tmp_path / "adapter"), lora_r=2), torch.float32)
    assert read.tokenization.tokenizer.get_vocab() == loaded.tokenization.tokenizer.get_vocab()
    assert read.tokenization.text_ids("Hello") == loaded.tokenization.text_ids("Hello")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    write_base(tmp_path / "base", True, torch.float32)
    for path in (tmp_path / "base").glob("*token*"):
        path.unlink()
    with pytest.raises(UserError, match="base: it holds no tokenizer"):
        load(ModelConfig(model=str(tmp_path / "base")), torch.float32)


def test_an_adapter_finds_its_base_after_both_were_moved(tmp_path):
    write_base(tmp_path / "here" / "runs" / "sft", True, torch.float32)
    loaded = load(ModelConfig(model=str(tmp_path / "here" / "runs" / "sft"), lora_r=2), torch.float32)
    save_model(tmp_path / "here" / "runs" / "ppo" / "model", loaded, weights_of(loaded.backbone), CARD)
    (tmp_path / "here").rename(tmp_path / "there")
    read = load(ModelConfig(model=str(tmp_path / "there" / "runs" / "ppo" / "model"), lora_r=2), torch.float32)
    assert read.base == str(tmp_path / "there" / "runs" / "sft")


def test_the_base_of_an_adapter_is_an_absolute_path(tmp_path, monkeypatch):
    write_base(tmp_path / "base", True, torch.float32)
    monkeypatch.chdir(tmp_path)
    loaded = load(ModelConfig(model="base", lora_r=2), torch.float32)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    assert read_json(tmp_path / "adapter" / "adapter_config.json")["base_model_name_or_path"] == str(tmp_path / "base")
