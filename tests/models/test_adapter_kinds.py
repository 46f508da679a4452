import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, BigBirdPegasusConfig

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.models.adapters import adapter_parameters, copy_adapter, merge_adapter
from align.models.checkpoint import save_model, weights_of
from align.models.loading import from_objects, load
from align.ppo.actor_critic import build_actor_critic, critic_weights
from align.ppo.scoring_models import can_share_base
from tests.models.adapters import CARD, IDS, response_logits, save_reward, trainable
from tests.models.architectures import make_model

# GPT-2 has biases and one matrix for both vocabularies; Llama here has neither.
CONTINUED = {
    "bias of B": ("tiny-llama", "q_proj", {"lora_bias": True}),
    "bias of B and of the base": ("tiny-gpt2", "c_attn", {"lora_bias": True}),
    "embedding": ("tiny-llama", "q_proj,embed_tokens", {}),
    "tied embedding": ("tiny-gpt2", "c_attn,wte", {}),
    "pissa": ("tiny-llama", "q_proj", {"init_lora_weights": "pissa"}),
    "olora": ("tiny-llama", "q_proj", {"init_lora_weights": "olora"}),
    "whole vocabulary matrix": ("tiny-llama", "q_proj", {"modules_to_save": ["lm_head"]}),
}
MERGED = {
    "plain": ("tiny-llama", "q_proj,v_proj", {}),
    "bias of B and of the base": ("tiny-gpt2", "c_attn", {"lora_bias": True}),
    "biases of the base": ("tiny-gpt2", "c_attn", {"bias": "all"}),
    "tied embedding": ("tiny-gpt2", "c_attn,wte", {}),
    "tied vocabulary matrix": ("tiny-gpt2", "c_attn,lm_head", {}),
    "both of one weight": ("tiny-gpt2", "wte,lm_head", {}),
    "whole vocabulary matrix": ("tiny-gpt2", "c_attn", {"modules_to_save": ["lm_head"]}),
}


def settings_of(folder, targets, rank=2, **more):
    return ModelConfig(model=folder, lora_r=rank, lora_alpha=8, lora_target_modules=targets, **more)


@torch.no_grad()
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", CONTINUED)
def test_a_continued_adapter_starts_as_in_peft_and_is_trained_whole(make_adapter, sharp_folders, kind, checkpointing):
    """PEFT's `modules_to_save` keeps whole matrices in an adapter: the base must be read without them."""
    name, targets, settings = CONTINUED[kind]
    folder, expected = make_adapter(name, targets, **settings)
    loaded = load(settings_of(folder, targets, gradient_checkpointing=checkpointing), torch.float32)
    for adapter in ("start", "policy"):
        torch.testing.assert_close(response_logits(loaded.backbone, adapter), expected[0, 2:], atol=5e-5, rtol=0)
    if "init_lora_weights" not in settings:  # others change the base
        bare = AutoModelForCausalLM.from_pretrained(sharp_folders[name])(IDS).logits
        torch.testing.assert_close(response_logits(loaded.backbone, None), bare[0, 2:], atol=1e-5, rtol=0)
    per_layer, whole = 3 if "lora_bias" in settings else 2, len(settings.get("modules_to_save", ()))
    layers = 1 + 1 + len(targets.split(",")) - 1  # two layers of attention, and the embedding if it is a target
    assert len(trainable(loaded.backbone)) == per_layer * layers + whole
    assert trainable(loaded.backbone) == adapter_parameters(loaded.backbone.model, "policy").keys()


@pytest.mark.parametrize("kind", MERGED)
def test_a_merged_adapter_computes_the_same_and_so_does_its_saved_folder(make_adapter, kind, tmp_path):
    name, targets, settings = MERGED[kind]
    folder, expected = make_adapter(name, targets, **settings)
    loaded = load(settings_of(folder, targets, rank=0), torch.float32)
    assert loaded.adapter is None
    assert all(weight.requires_grad for weight in loaded.backbone.model.parameters())
    torch.testing.assert_close(response_logits(loaded.backbone), expected[0, 2:], atol=5e-5, rtol=0)
    save_model(tmp_path / "merged", loaded, weights_of(loaded.backbone), CARD)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, expected, atol=5e-5, rtol=0)


def encoder_decoder(kind, folder, tokenizer, whole):
    """An adapter of PEFT with a whole module, on a tiny UMT5 or BART."""
    architecture = {"umt5": "UMT5", "bart": "BART"}[kind]
    torch.manual_seed(0)
    base = make_model(architecture)
    for part in (base, tokenizer):
        part.save_pretrained(folder / "base")
    targets = ["q"] if kind == "umt5" else ["q_proj"]
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=targets, modules_to_save=[whole]))
    with torch.no_grad():
        for weight in adapted.parameters():
            weight.add_(0.1 * torch.randn_like(weight) * weight.requires_grad)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    for part in (adapted, tokenizer):
        part.save_pretrained(folder / "adapter")
    return adapted.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["umt5", "bart"])
def test_an_encoder_decoder_with_a_vocabulary_matrix_of_its_adapter_is_merged(kind, sharp_folders, tmp_path):
    """UMT5 scales its states, and BART's halves share an embedding, while the config ties the vocabulary matrix."""
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-t5"])
    adapted = encoder_decoder(kind, tmp_path, tokenizer, "lm_head")
    start = adapted.get_base_model().config.decoder_start_token_id
    given = {"input_ids": IDS, "decoder_input_ids": torch.tensor([[start, 20, 21]])}
    expected = adapted(**given).logits
    loaded = load(ModelConfig(model=str(tmp_path / "adapter")), torch.float32)
    save_model(tmp_path / "merged", loaded, weights_of(loaded.backbone), CARD)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    for model in (loaded.backbone.model, theirs):
        torch.testing.assert_close(model(**given).logits, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("whole", ["shared", "embed_tokens"])
def test_a_whole_copy_of_the_embedding_that_both_halves_share_cannot_be_merged(whole, sharp_folders, tmp_path):
    """The saved folder would hold one of the two."""
    encoder_decoder("bart", tmp_path, AutoTokenizer.from_pretrained(sharp_folders["tiny-t5"]), whole)
    with pytest.raises(UserError, match="cannot be merged, because it has a whole copy of a weight that its base shares"):
        load(ModelConfig(model=str(tmp_path / "adapter")), torch.float32)


def test_a_shared_weight_in_parts_cannot_be_merged(make_adapter, sharp_folders):
    """Under ZeRO-3, which marks each parameter by `ds_id`, no process has the whole embedding to copy."""
    folder, _ = make_adapter("tiny-gpt2", "c_attn,wte")
    base = AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-gpt2"])
    model = PeftModel.from_pretrained(base, folder)
    base.transformer.wte.base_layer.weight.ds_id = 0
    with pytest.raises(UserError, match=r"it adapts one of 2 layers that share a weight and cannot be merged, under ZeRO-3"):
        merge_adapter(model, folder)


REFUSED = [
    ("tiny-gpt2", "c_attn", {"bias": "all"}, {}, "adapter with bias all, which .*: set lora_r to 0 to merge"),
    ("tiny-gpt2", "c_attn", {"bias": "lora_only"}, {}, "adapter with bias lora_only, which .*: set lora_r to 0"),
    ("tiny-llama", "q_proj", {"lora_bias": True}, {"lora_r": 0}, "PEFT cannot merge it into its base .*layer has no bias"),
    ("tiny-t5", "q,shared", {}, {"lora_r": 0}, "adapts one of [34] layers that share a weight and cannot be merged"),
    # Settings that the adapter cannot take
    ("tiny-llama", "q_proj", {}, {"lora_r": 16}, "is an adapter with lora_r 2, which .*; lora_r is 16: set it to 2, or set"),
    ("tiny-llama", "q_proj", {}, {"lora_alpha": 4.0}, "is an adapter with lora_alpha 8, .* lora_alpha is 4.0: set it to 8"),
    (
        "tiny-llama",
        "q_proj",
        {},
        {"lora_target_modules": "q_proj,v_proj"},
        "which .* is q_proj,v_proj: set it to q_proj",
    ),
    ("tiny-llama", "q_proj", {}, {"lora_target_modules": "all-linear"}, "q_proj, .* is all-linear: set it to q_proj"),
]


@pytest.mark.parametrize(("name", "targets", "settings", "given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_continued_or_merged_is_refused(make_adapter, name, targets, settings, given, message):
    folder, _ = make_adapter(name, targets, **settings)
    with pytest.raises(UserError, match=message):
        load(replace(settings_of(folder, targets), **given), torch.float32)


@pytest.mark.parametrize("name", ["tiny-llama", "bigbird-pegasus"])
def test_a_separate_critic_trains_its_adapter_alone_at_its_rate(sharp_folders, load_sharp, name):
    """BigBird-Pegasus has layers called `value`, as the critic's adapter is, and LoRA on an embedding has no module."""
    if name == "tiny-llama":
        loaded = load_sharp(name, lora_r=2, lora_target_modules="q_proj,embed_tokens")
    else:
        sizes = {
            "d_model": 32,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "vocab_size": 384,
            "attention_type": "original_full",
        }
        sizes |= {f"{half}_{part}": 2 for half in ("encoder", "decoder") for part in ("layers", "attention_heads")}
        model = AutoModelForSeq2SeqLM.from_config(BigBirdPegasusConfig(**sizes))
        assert any(".value." in key for key, _ in model.named_parameters())
        tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-t5"])
        loaded = from_objects(model, tokenizer, ModelConfig(lora_r=2, lora_target_modules="query,value"))
    module = build_actor_critic(loaded, "separate")
    model = loaded.backbone.model
    policy, critic = (adapter_parameters(model, adapter) for adapter in ("policy", "value"))
    assert len(policy) == len(critic) > 0
    assert trainable(loaded.backbone) == policy.keys() | critic.keys()
    assert not any("base_layer" in key for key in trainable(loaded.backbone))
    of_critic = {f"backbone.model.{key}" for key in critic}
    assert critic_weights(module) == of_critic | {"value_head.linear.weight", "value_head.linear.bias"}


@pytest.mark.parametrize(
    ("settings", "shares"), [({}, True), ({"bias": "all"}, False), ({"init_lora_weights": "pissa"}, False)], ids=str
)
def test_adapters_that_change_their_base_are_not_mounted_on_the_policys(settings, shares, load_sharp, tmp_path):
    """A reward adapter with biases of the base, or one made by PiSSA, would change what the policy computes."""
    policy = load_sharp("tiny-gpt2", lora_r=2, lora_target_modules="c_attn")
    reward = load_sharp("tiny-gpt2", adapter="reward", lora_r=2, lora_target_modules="c_attn")
    save_reward(tmp_path / "reward", reward)
    path = tmp_path / "reward" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert can_share_base(str(path.parent), policy) == shares


def test_a_copy_keeps_its_sources_settings_for_its_file(make_adapter):
    """A PiSSA adapter fits only a base from which its initialization was taken out: its file must say so."""
    folder, _ = make_adapter("tiny-llama", "q_proj", init_lora_weights="pissa")
    peft_model = load(settings_of(folder, "q_proj"), torch.float32).backbone.peft
    copy_adapter(peft_model, "policy", "value")
    assert {name: each.init_lora_weights for name, each in peft_model.peft_config.items()} == dict.fromkeys(
        ("start", "policy", "value"), "pissa"
    )
