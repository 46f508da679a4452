"""Learning rates that fall from layer to layer, as ULMFiT's: every weight's rate by hand, for all kinds of models."""

import pytest

from align.core.errors import UserError
from align.models.heads import LanguageModel, RewardModel, ScalarHead
from align.sft import SFTConfig
from align.training.optimizer import ParamGroup
from align.training.start import build_engine


def rates(engine):
    """The rate of each weight after a step, by its name."""
    names = {id(master): name for name, master in engine.masters.items()}
    return {names[id(w)]: group["lr"] for group in engine.optimizer.param_groups for w in group["params"]}


def step(module, run, **more):
    engine = build_engine(run, module, 10, **more)
    for master in engine.masters.values():
        master.grad = master.detach().clone()
    return engine, engine.step(1)


def test_each_weight_of_a_decoder_by_hand(load_sharp, make_run):
    """Two layers at a decay of one half: heads and the last norm 1, layers 1/2 and 1/4, embeddings 1/8."""
    loaded = load_sharp("tiny-llama")
    run = make_run(SFTConfig, "sft", layerwise_lr_decay=0.5, learning_rate=0.8, warmup_ratio=0.0)
    head = ScalarHead(loaded.backbone.hidden_size)
    engine, metrics = step(RewardModel(loaded.backbone, head), run)
    found = rates(engine)
    expected = {"embed_tokens": 0.1, "layers.0.": 0.2, "layers.1.": 0.4, "model.norm": 0.8, "lm_head": 0.8}
    for name, rate in found.items():
        wanted = next((value for part, value in expected.items() if part in name), 0.8)
        assert rate == pytest.approx(wanted), name
    assert {part for part in expected if any(part in name for name in found)} == set(expected)
    assert found["head.linear.weight"] == 0.8
    assert metrics["learning_rate"] == 0.8
    decay = {group["scale"]: group["weight_decay"] for group in engine.optimizer.param_groups}
    assert len(decay) == 4


def test_an_encoder_lies_below_its_decoder(load_sharp, make_run):
    loaded = load_sharp("tiny-t5")
    run = make_run(SFTConfig, "sft", layerwise_lr_decay=0.5, learning_rate=1.6, warmup_ratio=0.0)
    found = rates(step(LanguageModel(loaded.backbone), run)[0])
    for part, rate in (("shared", 0.05), ("encoder.block.0", 0.1), ("encoder.block.1", 0.2), ("decoder.block.0", 0.4)):
        assert all(found[name] == pytest.approx(rate) for name in found if part in name), part
        assert any(part in name for name in found)
    assert all(found[name] == pytest.approx(0.8) for name in found if "decoder.block.1" in name)
    assert found["backbone.model.lm_head.weight"] == pytest.approx(1.6)


def test_adapters_and_groups_are_scaled_too(load_sharp, make_run):
    loaded = load_sharp("tiny-gpt2", lora_r=4)
    run = make_run(SFTConfig, "sft", layerwise_lr_decay=0.5, learning_rate=1.0, warmup_ratio=0.0)
    module = LanguageModel(loaded.backbone, loaded.adapter)
    lower = frozenset(name for name, w in module.named_parameters() if w.requires_grad and "lora_A" in name)
    found = rates(step(module, run, groups=[ParamGroup("a", lower, 3.0)])[0])
    assert all("lora_" in name for name in found)
    for name, rate in found.items():
        assert rate == pytest.approx((3.0 if name in lower else 1.0) * (0.5 if ".h.1." in name else 0.25)), name


def test_without_decay_nothing_is_split(load_sharp, make_run):
    loaded = load_sharp("tiny-llama")
    engine, _ = step(LanguageModel(loaded.backbone), make_run(SFTConfig, "sft"))
    assert [group["scale"] for group in engine.optimizer.param_groups] == [1.0, 1.0]
    with pytest.raises(UserError, match=r"layerwise_lr_decay is 1\.5, but must be above 0 and at most 1"):
        SFTConfig(layerwise_lr_decay=1.5)
