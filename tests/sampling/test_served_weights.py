import copy

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry.tiny import byte_tokenizer
from align.models.adapters import copy_adapter
from align.models.loading import from_objects
from align.sampling.vllm_weights import require_servable, served_weights, weight_layout
from tests.models.architectures import DECODERS as ALL_DECODERS
from tests.models.architectures import make_model

DECODERS = ("tiny-llama", "tiny-gpt2")
CORE = ("GPT-NeoX (parallel layers)", "Mixtral, experts", "Falcon, multi-query")
DECODERS_OF_THE_PAGE = [
    pytest.param(decoder.name, marks=[pytest.mark.slow] * (decoder.name not in CORE)) for decoder in ALL_DECODERS
]


def plain_names(loaded):
    """What a checkpoint of the bare model calls its weights."""
    return [name for name, _ in loaded.backbone.model.named_parameters()]


@pytest.mark.parametrize("name", DECODERS)
def test_an_adapter_is_added_as_peft_would_merge_it(load_sharp, name):
    """GPT-2's matrices are stored the other way round; a second adapter on the same layers must not be mixed in."""
    plain, loaded = load_sharp(name), load_sharp(name, lora_r=4, lora_alpha=6.0)
    copy_adapter(loaded.backbone.peft, "policy", "value")
    before = {key: weight.clone() for key, weight in loaded.backbone.model.named_parameters()}
    for key, weight in loaded.backbone.model.named_parameters():
        if ".value." in key:
            torch.nn.init.normal_(weight)
    sent = dict(served_weights(loaded.backbone, "policy"))
    assert list(sent) == plain_names(plain)
    assert weight_layout(loaded.backbone, "policy") == [(key, "float32", list(w.shape)) for key, w in sent.items()]
    peft_model = copy.deepcopy(loaded.backbone.peft)
    peft_model.set_adapter("policy")
    merged = dict(peft_model.merge_and_unload(adapter_names=["policy"]).named_parameters())
    assert sum(not torch.equal(sent[key], weight) for key, weight in plain.backbone.model.named_parameters()) >= 8
    for key, value in sent.items():
        torch.testing.assert_close(value, merged[key], rtol=0, atol=1e-6)
    after = dict(loaded.backbone.model.named_parameters())
    assert all(torch.equal(after[key], weight) for key, weight in before.items() if ".value." not in key)


@pytest.mark.parametrize("lora_r", [0, 2])
@pytest.mark.parametrize("architecture", DECODERS_OF_THE_PAGE)
def test_the_names_and_shapes_are_those_of_a_plain_checkpoint(architecture, lora_r, tmp_path):
    """Of every decoder of docs/models.md. GPT-NeoX's output has another name in memory, and experts are one tensor there."""
    make_model(architecture).save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    config = ModelConfig(model="-", lora_r=lora_r)
    loaded = from_objects(make_model(architecture), byte_tokenizer(), config)
    sent = dict(served_weights(loaded.backbone, loaded.adapter))
    assert sent.keys() == plain.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in plain.items())  # a new adapter adds nothing
    layout = weight_layout(loaded.backbone, loaded.adapter)
    assert layout == [(name, "float32", list(weight.shape)) for name, weight in sent.items()]


def test_a_bfloat16_base_does_not_drift(load_sharp):
    loaded = load_sharp("tiny-llama", lora_r=4)
    loaded.backbone.model.to(torch.bfloat16)
    weights = dict(loaded.backbone.model.named_parameters())
    before = {key: weight.clone() for key, weight in weights.items()}
    for _ in range(3):
        sent = dict(served_weights(loaded.backbone, "policy"))
    assert {value.dtype for value in sent.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[key], value) for key, value in before.items())


def test_what_cannot_be_added_to_a_matrix_is_refused(load_sharp):
    plain = load_sharp("tiny-llama", lora_r=4)
    require_servable(plain.backbone, plain.adapter)
    model = load_sharp("tiny-llama").backbone
    peft_model = PeftModel(model.model, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), adapter_name="policy")
    model._unlisted["peft"] = peft_model
    with pytest.raises(UserError, match=r"'model.layers.0.self_attn.q_proj' is not plain LoRA"):
        require_servable(model, "policy")


def test_a_vocabulary_matrix_that_reads_and_writes_gets_no_adapter(load_sharp):
    loaded = load_sharp("tiny-llama")
    model = loaded.backbone.model
    model.lm_head.weight = model.model.embed_tokens.weight
    peft_model = PeftModel(model, LoraConfig(r=2, target_modules=["lm_head"]), adapter_name="policy")
    loaded.backbone._unlisted["peft"] = peft_model
    with pytest.raises(UserError, match=r"'lm_head"):
        require_servable(loaded.backbone, "policy")
