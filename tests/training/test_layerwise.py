"""Learning rates by layer and gradual unfreezing, on GPT-, Llama- and T5-style models."""

import pytest
import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.heads import LanguageModel, RewardModel, ScalarHead
from align.reward import RewardConfig
from align.sft import SFTConfig
from align.training.layerwise import LayerwiseConfig, distances_from_top, layer_groups
from align.training.setup import build_engine

PROMPTS, RESPONSES = Padded.from_lists([[9, 10, 11]]), Padded.from_lists([[12, 13, 14, 15]])
DISTANCES = {
    "tiny-gpt2": {
        "transformer.wte.weight": 2,
        "transformer.wpe.weight": 2,
        "transformer.h.0.attn.c_attn.weight": 1,
        "transformer.h.1.mlp.c_fc.bias": 0,
        "transformer.ln_f.weight": 0,
    },
    "tiny-llama": {
        "model.embed_tokens.weight": 2,
        "model.layers.0.self_attn.q_proj.weight": 1,
        "model.layers.1.input_layernorm.weight": 0,
        "model.norm.weight": 0,
    },
    "tiny-t5": {
        "shared.weight": 2,
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": 1,
        "encoder.block.1.layer.1.DenseReluDense.wo.weight": 0,
        "decoder.block.0.layer.1.EncDecAttention.k.weight": 1,
        "decoder.final_layer_norm.weight": 0,
    },
}


def test_distances_by_hand(sharp_backbones, tiny_name):
    model, distances = sharp_backbones[tiny_name].model, distances_from_top(sharp_backbones[tiny_name])
    weights = dict(model.named_parameters())
    assert {name: distances.get(id(weights[name]), 0) for name in DISTANCES[tiny_name]} == DISTANCES[tiny_name]


def engine_of(make_run, loaded, total=10, **settings):
    run = make_run(SFTConfig, "sft", learning_rate=1e-3, warmup_ratio=0.0, lr_scheduler_type="constant", **settings)
    module = LanguageModel(loaded.backbone, loaded.adapter)
    groups = layer_groups(run.config, 1e-3, loaded.backbone, module, total)
    return build_engine(run, module, total, groups)


def take_step(engine, update):
    """One optimizer step on a response; returns the metrics and the names of the weights that changed."""
    before = {name: weight.detach().clone() for name, weight in engine.trainable.items()}
    (-engine.module(PROMPTS, RESPONSES)).mean().backward()
    metrics = engine.step(update)
    return metrics, {name for name, weight in engine.trainable.items() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("lora_r", [0, 4])
def test_the_first_step_of_adam_is_as_large_as_the_rate_of_the_layer(make_run, load_sharp, tiny_name, lora_r):
    loaded = load_sharp(tiny_name, lora_r=lora_r)
    engine = engine_of(make_run, loaded, layer_lr_decay=0.5, max_grad_norm=0.0, adam_epsilon=1e-20)
    before = {name: weight.detach().clone() for name, weight in engine.trainable.items()}
    distances = distances_from_top(loaded.backbone)
    metrics, changed = take_step(engine, 1)
    rates = {name: rate for name, rate in metrics.items() if name.endswith("_below_top")}
    expected = {"learning_rate/1_below_top": 5e-4, "learning_rate/2_below_top": 2.5e-4}
    assert rates == ({"learning_rate/1_below_top": 5e-4} if lora_r else expected)
    assert metrics["learning_rate"] == 1e-3
    seen = set()
    for name in changed:
        distance = distances.get(id(engine.trainable[name]), 0)
        largest = float((engine.trainable[name].detach() - before[name]).abs().max())
        assert largest == pytest.approx(1e-3 * 0.5**distance, rel=0.02), name
        seen.add(distance)
    assert seen == ({0, 1} if lora_r else {0, 1, 2}), "LoRA trains no embeddings"


def test_layers_are_unfrozen_from_the_top(make_run, load_sharp, tiny_name):
    loaded = load_sharp(tiny_name)
    distances = distances_from_top(loaded.backbone)
    engine = engine_of(make_run, loaded, unfreeze_steps=2)
    for update, lowest in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2)):
        _, changed = take_step(engine, update)
        assert {distances.get(id(engine.trainable[name]), 0) for name in changed} == set(range(lowest + 1)), update


def test_a_reward_head_trains_with_the_top_layer(load_sharp):
    loaded = load_sharp("tiny-gpt2")
    module = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size))
    config = RewardConfig(layer_lr_decay=0.5, unfreeze_steps=1)
    groups = layer_groups(config, 4.0, loaded.backbone, module, 10)
    assert [(group.name, group.peak, group.frozen_steps) for group in groups] == [
        ("1_below_top", 2.0, 1),
        ("2_below_top", 1.0, 2),
    ]
    assert not any(name.startswith("head.") for group in groups for name in group.weights)
    assert all(".h.0." in name for name in groups[0].weights)


def test_by_default_there_is_one_group(load_sharp):
    loaded = load_sharp("tiny-llama")
    assert layer_groups(LayerwiseConfig(), 1.0, loaded.backbone, LanguageModel(loaded.backbone), 1) == []


def test_what_cannot_be_done_is_one_line(load_sharp):
    loaded = load_sharp("tiny-llama")
    module = LanguageModel(loaded.backbone)
    with pytest.raises(UserError, match=r"unfreeze_steps is 5: .* 10 updates, and the run has 10"):
        layer_groups(LayerwiseConfig(unfreeze_steps=5), 1.0, loaded.backbone, module, 10)
    for name, weight in module.named_parameters():
        weight.requires_grad_(".layers.1." in name)
    with pytest.raises(UserError, match="no weight below the top layer is trained"):
        layer_groups(LayerwiseConfig(layer_lr_decay=0.4), 1.0, loaded.backbone, module, 10)
