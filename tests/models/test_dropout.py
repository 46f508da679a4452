"""Dropout is off in every role, in training mode too, which gradient checkpointing needs."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    LlamaConfig,
    M2M100Config,
    OPTConfig,
    T5Config,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.models.checkpoint import weights_of
from align.models.loading import from_objects, load
from align.models.roles import REFERENCE_ADAPTER, LanguageModel, ScalarHead
from align.ppo.config import PPOConfig
from align.ppo.scoring_models import RULE_ADAPTER, load_reward_adapter
from align.ppo.setup import build_actor_critic, copy_backbone
from align.reward.checkpoint import RULE, save_reward_model
from tests.models.adapters import CARD, PROMPT, RESPONSE, states

HALVES = {f"{half}_{part}": 2 for half in ("encoder", "decoder") for part in ("layers", "attention_heads")}
HALVES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": 384}
WIDTH = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# Rates as large as this make every kind of dropout visible.
RANDOM = {
    "t5": T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": BartConfig(**HALVES, attention_dropout=0.3, activation_dropout=0.3),
    "m2m_100": M2M100Config(**HALVES, dropout=0.0, attention_dropout=0.0, encoder_layerdrop=0.7, decoder_layerdrop=0.7),
    "opt": OPTConfig(vocab_size=384, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, layerdrop=0.7),
    "llama": LlamaConfig(**WIDTH, attention_dropout=0.3),
}


def make(sharpen, config):
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return sharpen(auto.from_config(config))


@torch.no_grad()
@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("in_memory", [True, False], ids=["object", "folder"])
def test_in_training_mode_a_model_reads_as_in_evaluation_mode(kind, in_memory, sharpen, sharp_folders, tmp_path):
    model, tokenizer = make(sharpen, RANDOM[kind]), AutoTokenizer.from_pretrained(sharp_folders["tiny-t5"])
    expected = states(from_objects(model, tokenizer, ModelConfig()).backbone)
    model = make(sharpen, RANDOM[kind])
    config = ModelConfig(model=str(tmp_path / "model"), gradient_checkpointing=True)
    if in_memory:
        loaded = from_objects(model, tokenizer, config)
    else:
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        loaded = load(config, torch.float32)
    assert loaded.backbone.model.training
    for _ in range(4):
        for backbone in (loaded.backbone, copy_backbone(loaded.backbone)):
            torch.testing.assert_close(states(backbone), expected, atol=1e-5, rtol=0)


def test_what_is_random_in_training_mode_whatever_its_rates_is_refused(sharpen, sharp_folders):
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    model = make(sharpen, RANDOM["llama"])
    model.model.norm.register_forward_hook(
        lambda module, _, states: states + torch.randn_like(states) if module.training else states
    )
    assert not from_objects(model, tokenizer, ModelConfig()).backbone.model.training
    with pytest.raises(UserError, match=r"'llama' is random in training mode .*; set gradient_checkpointing to false"):
        from_objects(model, tokenizer, ModelConfig(gradient_checkpointing=True))


@pytest.fixture
def with_dropout(sharp_folders, tmp_path):
    """The settings of an adapter that was trained elsewhere with dropout."""
    base = AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-llama"])
    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "sft")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(sharp_folders["tiny-llama"]) / name, tmp_path / "sft")
    return ModelConfig(
        model=str(tmp_path / "sft"), lora_rank=2, lora_alpha=8, lora_targets="q_proj", gradient_checkpointing=True
    )


@torch.no_grad()
def test_adapters_that_are_copied_later_have_no_dropout_either(with_dropout):
    """The critic's and a moving reference's: before the first update the policy is its reference."""
    loaded = load(with_dropout, torch.float32)
    module = build_actor_critic(PPOConfig(critic="separate", reference_refresh=2), loaded)
    assert module.training
    for adapter in (module.critic_adapter, REFERENCE_ADAPTER, "start"):
        assert torch.equal(states(loaded.backbone, adapter), states(loaded.backbone, "policy"))


@pytest.mark.parametrize("kind", ["reward", "rules"])
def test_a_mounted_adapter_leaves_gradient_checkpointing_on(load_sharp, with_dropout, tmp_path, kind):
    """PEFT's `load_adapter` puts the whole model into evaluation mode, where transformers recomputes nothing."""
    reward = load_sharp("tiny-llama", adapter="reward", lora_rank=2)
    reward.backbone.peft.peft_config["reward"].lora_dropout = 0.5
    facts = {"mean": 0.0, "mean_over": 1, "base": reward.base}
    head = ScalarHead(reward.backbone.hidden_size, bias=False).linear.weight.detach()
    more = {"kind": RULE} if kind == "rules" else {}
    save_reward_model(tmp_path / kind, reward, weights_of(reward.backbone), head, facts, CARD | {"stage": kind}, **more)
    loaded = load(with_dropout, torch.float32)
    if kind == "rules":
        load_reward_adapter(str(tmp_path / kind), loaded, RULE_ADAPTER, RULE)
    else:
        load_reward_adapter(str(tmp_path / kind), loaded)
    calls = []
    block = next(m for m in loaded.backbone.model.modules() if isinstance(m, GradientCheckpointingLayer))
    block.input_layernorm.register_forward_pre_hook(lambda *_: calls.append(1))
    LanguageModel(loaded.backbone, loaded.adapter)(PROMPT, RESPONSE).sum().backward()
    assert len(calls) == 2  # once more for the gradient
    assert torch.equal(states(loaded.backbone, kind), states(loaded.backbone, kind))
