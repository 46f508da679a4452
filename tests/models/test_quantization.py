"""Quantized bases: what they compute, what they take, and what an adapter on one is elsewhere."""

import shutil
import sys

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.model_registry.registry import resolve_model
from align.models.backbone import flops_profile, wrap
from align.models.checkpoint import merge_model, save_model, weights_of
from align.models.loading import from_objects, load, load_on_meta, load_tokenization, load_whole
from align.models.quantization import dequantized, quantization_of, require_quantizable
from align.runtime.sharding import full_nbytes
from align.training.memory import optimizer_bytes
from align.training.model_source import ModelSource
from tests.models.adapters import CARD

FORMATS = {
    "nf4-double": {"load_in_4bit": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "int8": {"load_in_8bit": True},
}
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 4-bit NormalFloat data type, as in appendix E of the QLoRA paper (arXiv 2305.14314)."""
PROMPTS, RESPONSES = [[70, 71, 72], [90, 91]], [[80, 81, 82, 83], [75]]


def rows():
    return Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)


def moved(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(weight.dtype))


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
def test_a_quantized_base_computes_what_its_dequantized_weights_compute(name, quantization):
    loaded = load_whole(name, torch.float32, quantization=quantization)
    assert quantization_of(loaded.backbone.model.config) == quantization
    with torch.no_grad():
        hidden = loaded.backbone.hidden(*rows())
        logits = loaded.backbone.logits(hidden[:, :-1])
    plain = wrap(dequantized(loaded.backbone.model, torch.float32))
    assert all(weight.is_floating_point() for weight in plain.model.parameters())
    torch.testing.assert_close(plain.logits(plain.hidden(*rows())[:, :-1]), logits, atol=1e-5, rtol=1e-5)
    original = load_whole(name, torch.float32)
    assert not torch.allclose(original.backbone.hidden(*rows()), hidden, atol=1e-4), "nothing was quantized"


@pytest.mark.parametrize("quantization", FORMATS)
def test_log_probs_depend_on_neither_batch_nor_mode(quantization):
    loaded = load(ModelConfig(model="tiny-llama", lora_r=2, **FORMATS[quantization]), torch.float32)
    backbone, (prompts, responses) = loaded.backbone, rows()
    together = backbone.hidden(prompts, responses)
    alone = backbone.hidden(Padded.from_lists(PROMPTS[1:]), Padded.from_lists(RESPONSES[1:]))
    torch.testing.assert_close(together[1, :2], alone[0], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(backbone.hidden(prompts, responses), together)
    backbone.train()
    assert torch.equal(backbone.hidden(prompts, responses), together)
    together.sum().backward()
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    assert trained
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in trained)


def test_the_gradient_is_that_of_the_dequantized_weights():
    for quantization in FORMATS:
        model = load_whole("tiny-llama", torch.float32, quantization=quantization).backbone.model
        plain = dequantized(model, torch.float32)
        states = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
        gradients = []
        for each in (model, plain):
            given = states.clone().requires_grad_(True)
            each(inputs_embeds=given).logits.square().sum().backward()
            gradients.append(given.grad)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_nf4_keeps_the_numbers_of_its_paper(tmp_path):
    folder = resolve_model("tiny-llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = model.model.layers[0].self_attn.q_proj
    block = torch.tensor(NF4 * 4)  # 64 numbers, of which the largest is 1
    with torch.no_grad():
        layer.weight.copy_(block * torch.arange(1, 65).view(64, 1) / 8)
        layer.weight[0, 1] = -0.65 / 8  # lies between two: the nearer one is -0.696
    model.save_pretrained(tmp_path)
    load_tokenization("tiny-llama").tokenizer.save_pretrained(tmp_path)
    loaded = load_whole(str(tmp_path), torch.float32, quantization="nf4")
    stored = dequantized(loaded.backbone.model, torch.float32).model.layers[0].self_attn.q_proj.weight
    expected = block * torch.arange(1, 65).view(64, 1) / 8
    torch.testing.assert_close(stored, expected, atol=1e-6, rtol=1e-6)


def held_bytes(model):
    """The bytes of all tensors of a model, counted from the tensors."""
    total = 0
    for weight in {id(weight): weight for weight in model.parameters()}.values():
        total += weight.numel() * weight.element_size()
        if (state := getattr(weight, "quant_state", None)) is not None:
            total += state.absmax.numel() * state.absmax.element_size()
            total += 4 * state.state2.absmax.numel() if state.nested else 0
    for layer in model.modules():
        if hasattr(layer, "state") and getattr(layer.weight, "dtype", None) == torch.int8:
            total += 4 * (layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB).numel()
    return total


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
def test_the_estimate_knows_the_bytes_and_flops_of_a_quantized_base(name, quantization):
    config = ModelConfig(model=name, lora_r=4, **FORMATS[quantization])
    loaded, planned = load(config, torch.bfloat16), load_on_meta(config, torch.bfloat16)
    plain = load(ModelConfig(model=name, lora_r=4), torch.bfloat16)
    sizes = [sum(map(full_nbytes, each.backbone.parameters())) for each in (loaded, planned, plain)]
    assert sizes[0] == held_bytes(loaded.backbone.model)
    assert sizes[1] == sizes[0] < 0.85 * sizes[2]
    profiles = [flops_profile(each.backbone, each.adapter) for each in (loaded, planned, plain)]
    assert profiles[0] == profiles[1] == profiles[2]


def test_bytes_of_lean_optimizers_by_hand():
    assert optimizer_bytes("adamw", (64, 64)) == 8 * 4096
    assert optimizer_bytes("adamw_8bit", (64, 64)) == 2 * (4096 + 4 * 16)
    assert optimizer_bytes("paged_adamw_8bit", (64, 63)) == 8 * 4032, "smaller weights have float32 moments"
    assert optimizer_bytes("lion_8bit", (64, 64)) == 4096 + 4 * 16
    assert optimizer_bytes("paged_adamw_32bit", (64, 64)) == 8 * 4096


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
def test_a_trained_adapter_merges_into_the_dequantized_base_and_loads_by_peft(name, quantization, tmp_path, capsys):
    base = str(shutil.copytree(resolve_model(name), tmp_path / "base"))  # PEFT knows no built-in names
    loaded = load(ModelConfig(model=base, lora_r=2, **FORMATS[quantization]), torch.float32)
    moved(loaded.backbone)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    with torch.no_grad(), loaded.backbone.adapter(loaded.adapter):
        expected = loaded.backbone.logits(loaded.backbone.hidden(*rows())[:, :-1])
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as stored:
        assert stored.metadata()["base_quantization"] == quantization
    capsys.readouterr()
    merge_model(str(tmp_path / "adapter"), tmp_path / "merged")
    said = capsys.readouterr().err + capsys.readouterr().out
    assert "dequantized" in said
    assert quantization in said
    for folder, given in (("merged", ""), ("adapter", ""), ("adapter", quantization)):
        again = load_whole(str(tmp_path / folder), torch.float32, quantization=given)
        with torch.no_grad():
            logits = again.backbone.logits(again.backbone.hidden(*rows())[:, :-1])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    settings = {**FORMATS[quantization]}
    if "load_in_4bit" in settings:
        settings["bnb_4bit_use_double_quant"] = quantization.endswith("double")
        settings["bnb_4bit_quant_type"] = quantization.partition("-")[0]
        settings["bnb_4bit_compute_dtype"] = torch.float32
    kind = AutoPeftModelForSeq2SeqLM if name == "tiny-t5" else AutoPeftModelForCausalLM
    how = {"quantization_config": BitsAndBytesConfig(**settings), "dtype": torch.float32}
    elsewhere = kind.from_pretrained(tmp_path / "adapter", **how).train()  # 8 bits: without quantized activations
    if name == "tiny-t5":
        start = torch.tensor([[elsewhere.config.decoder_start_token_id, *RESPONSES[0][:-1]]])
        theirs = elsewhere(input_ids=torch.tensor(PROMPTS[:1]), decoder_input_ids=start).logits[0]
    else:
        theirs = elsewhere(input_ids=torch.tensor([PROMPTS[0] + RESPONSES[0]])).logits[0, 2:-1]
    torch.testing.assert_close(theirs, expected[0], atol=1e-3, rtol=1e-3)


def test_an_adapter_on_another_base_than_in_training_is_reported(tmp_path, capsys):
    loaded = load(ModelConfig(model="tiny-llama", lora_r=2, load_in_4bit=True), torch.float32)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    name = str(tmp_path / "adapter")
    for given, said in (({}, "load_in_4bit"), ({"load_in_8bit": True}, "load_in_4bit"), ({"load_in_4bit": True}, "")):
        capsys.readouterr()
        load(ModelConfig(model=name, lora_r=2, **given), torch.float32)
        printed = capsys.readouterr().err
        assert (said in printed and "warning" in printed) if said else "warning" not in printed
    whole = load(ModelConfig(model=name), torch.float32)  # all weights are trained
    assert all(weight.requires_grad for weight in whole.backbone.parameters())


def test_what_cannot_work_is_refused_before_anything_is_loaded(monkeypatch):
    def not_called(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("align.models.loading.load_weights", not_called)
    for given in ({"load_in_4bit": True}, {"load_in_8bit": True}):
        with pytest.raises(UserError, match=r"tiny-llama.* cannot be trained; set lora_r"):
            load(ModelConfig(model="tiny-llama", **given), torch.float32)
        with pytest.raises(UserError, match="cannot be trained"):
            ModelSource("tiny-llama").settings(ModelConfig(model="tiny-llama", **given))
    with pytest.raises(UserError, match="load_in_8bit"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)
    with pytest.raises(UserError, match="ZeRO-3"):
        require_quantizable("int8", "tiny-llama", "", sharded=True)
    with pytest.raises(UserError, match="stored as nf4"):
        require_quantizable("int8", "tiny-llama", "nf4", sharded=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"bitsandbytes is not installed.*quant"):
        require_quantizable("int8", "tiny-llama", "", sharded=False)


def test_a_checkpoint_that_is_stored_quantized_is_trained_with_an_adapter_only(tmp_path):
    folder, settings = resolve_model("tiny-llama"), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings).save_pretrained(tmp_path / "stored")
    load_tokenization("tiny-llama").tokenizer.save_pretrained(tmp_path / "stored")
    name = str(tmp_path / "stored")
    with pytest.raises(UserError, match="cannot be trained"):
        ModelSource(name).settings(ModelConfig(model=name))
    with pytest.raises(UserError, match="cannot be trained"):
        load(ModelConfig(model=name), torch.float32)
    with pytest.raises(UserError, match="stored as nf4"):
        load(ModelConfig(model=name, lora_r=2, load_in_8bit=True), torch.float32)
    loaded = load(ModelConfig(model=name, lora_r=2), torch.float32)
    moved(loaded.backbone)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    merge_model(str(tmp_path / "adapter"), tmp_path / "merged")
    with torch.no_grad():
        states = [
            load_whole(str(tmp_path / folder), torch.float32).backbone.hidden(*rows()) for folder in ("merged", "adapter")
        ]
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    fresh = load(
        ModelConfig(model="tiny-llama", lora_r=2, load_in_4bit=True, bnb_4bit_use_double_quant=False), torch.float32
    )
    assert torch.equal(fresh.backbone.hidden(*rows()), load_whole(name, torch.float32).backbone.hidden(*rows()))


@pytest.mark.parametrize("quantization", ["", *FORMATS])
def test_a_float16_model_in_memory_is_converted_in_one_line(quantization, capsys):
    folder, tokenizer = resolve_model("tiny-llama"), load_tokenization("tiny-llama").tokenizer
    settings = {"quantization_config": BitsAndBytesConfig(**FORMATS[quantization])} if quantization else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, **settings)
    lora = {"lora_r": 2} if quantization else {}
    source = ModelSource(model, tokenizer)
    config = source.settings(ModelConfig(**lora))
    assert model.dtype in (torch.bfloat16, torch.float32)
    assert config.dtype == str(model.dtype).removeprefix("torch.")
    assert [line for line in capsys.readouterr().err.splitlines() if "float16" in line and "converted" in line]
    loaded = from_objects(model, tokenizer, config)
    assert torch.isfinite(loaded.backbone.hidden(*rows()).float()).all()
