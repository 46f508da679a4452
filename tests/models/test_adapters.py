import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from align.core.settings import ModelConfig
from align.models.adapters import copy_adapter
from align.models.checkpoint import save_model, weights_of
from align.models.folders import base_of
from align.models.loading import load
from align.models.roles import Role
from align.ppo.rollout import plan_minibatch
from align.ppo.train import minibatches_of_epoch
from tests.models.adapters import CARD, PROMPT, RESPONSE, adapter_weights, states, trainable
from tests.models.losses import experience_of, minibatch_loss, role_outputs


def test_switching_moves_no_requires_grad_and_is_undone(lora):
    backbone = lora.backbone
    copy_adapter(backbone.peft, "policy", "value")
    before = {name: weight.requires_grad for name, weight in backbone.model.named_parameters()}
    outside = backbone.hidden(PROMPT, RESPONSE)
    with backbone.adapter(None):
        with backbone.adapter("value"), backbone.adapter("policy"):
            assert {n: w.requires_grad for n, w in backbone.model.named_parameters()} == before
        assert {n: w.requires_grad for n, w in backbone.model.named_parameters()} == before
    with pytest.raises(KeyError), backbone.adapter(None):
        raise KeyError
    assert torch.equal(backbone.hidden(PROMPT, RESPONSE), outside)
    assert {n: w.requires_grad for n, w in backbone.model.named_parameters()} == before


def test_a_copied_adapter_is_equal_at_the_start_independent_later_and_alone_trainable(lora):
    backbone = lora.backbone
    assert trainable(backbone) == set(adapter_weights(backbone, "policy"))
    copy_adapter(backbone.peft, "policy", "value")
    assert trainable(backbone) == set(adapter_weights(backbone, "value"))
    start = states(backbone, "policy")
    assert torch.equal(states(backbone, "value"), start)
    with torch.no_grad():
        for weight in adapter_weights(backbone, "value").values():
            weight.mul_(-1.5)
    assert torch.equal(states(backbone, "policy"), start)
    assert (states(backbone, "value") - start).abs().max() > 0.1


@pytest.fixture(params=["lora", "lora from an adapter", "full"])
def beginning(request, tiny_name, load_sharp, sharp_folders, tmp_path):
    """The model as each mode of PPO starts from it."""
    if request.param == "full":
        return load_sharp(tiny_name)
    if request.param == "lora":
        return load_sharp(tiny_name, lora_r=4, fresh_adapter=True)
    before = load_sharp(tiny_name, lora_r=4)
    save_model(tmp_path / "sft", before, weights_of(before.backbone), CARD)
    loaded = load(ModelConfig(model=str(tmp_path / "sft"), lora_r=4), torch.float32)
    assert (loaded.adapter, loaded.initial_adapter) == ("policy", "start")
    assert torch.equal(states(loaded.backbone, "policy"), states(before.backbone, "policy"))
    return loaded


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_ppo_starts_at_its_reference_with_a_ratio_of_1(beginning, critic, make_ppo, hand_rollout):
    trainer = make_ppo(beginning, critic=critic, num_mini_batches=2, micro_batch_tokens=30, temperature=0.7)
    config = trainer.config
    roles = role_outputs(trainer, hand_rollout)
    assert roles.log_probs.min() < -1.0  # something was said
    torch.testing.assert_close(roles.log_probs, roles.ref_log_probs, atol=1e-6, rtol=0)
    experience = experience_of(trainer, hand_rollout, torch.tensor([1.0, -0.5, 0.3, 0.0, 2.0, -1.0]), roles)
    first = minibatches_of_epoch(config, len(hand_rollout), update=1, epoch=0)[0]
    place = (trainer.loaded.backbone, config.micro_batch_tokens, trainer.run.accelerator)
    loss = minibatch_loss(trainer, experience, first)
    for batch in plan_minibatch(hand_rollout, first, *place):
        assert float(loss(batch.rows)[1]["ratio/abs_error"]) == 0.0  # batched as they were scored
    for part in (first, first[:1]):  # log-probs near -16 are known to 2e-6 in float32
        sums = loss(part)[1]
        assert float(sums["ratio/abs_error"]) < 3e-6
        assert float(sums["policy/clipfrac"]) == 0.0
    assert float(loss(first)[1]["ratio/mean"]) == pytest.approx(1.0, abs=1e-6)


def policy_gradients(beginning, make_ppo, checkpointing, **settings):
    """Gradients of a mixed loss of log-probs and values, and how often the first block was computed."""
    trainer = make_ppo(beginning(checkpointing), **settings)
    module, calls = trainer.engine.module, []
    torch.manual_seed(5)
    torch.nn.init.normal_(module.value_head.linear.weight)
    block = next(m for m in module.backbone.model.modules() if isinstance(m, GradientCheckpointingLayer))
    norm = next(m for m in block.modules() if "Norm" in type(m).__name__)  # hooks on the block itself are not run again
    norm.register_forward_pre_hook(lambda *_: calls.append(1))
    said = module(Role.POLICY, PROMPT, RESPONSE)
    forward = len(calls)
    (said.log_probs.sum() + said.values.sum()).backward()
    return forward, len(calls), {name: w.grad for name, w in trainer.engine.trainable.items() if w.grad is not None}


@pytest.mark.parametrize("mode", ["lora from an adapter, separate critic", "lora, separate critic", "full"])
def test_recomputing_blocks_changes_no_gradient(tiny_name, load_sharp, make_ppo, tmp_path, mode):
    """Blocks are computed again when the adapter of their role has long been switched off."""

    def beginning(checkpointing):
        if mode == "full":
            return load_sharp(tiny_name, gradient_checkpointing=checkpointing)
        loaded = load_sharp(tiny_name, lora_r=4, gradient_checkpointing=checkpointing)
        if mode.startswith("lora,"):
            return loaded
        save_model(tmp_path / "sft", loaded, weights_of(loaded.backbone), CARD)
        config = ModelConfig(model=str(tmp_path / "sft"), lora_r=4, gradient_checkpointing=checkpointing)
        return load(config, torch.float32)

    critic = "separate" if "critic" in mode else "shared"
    passes = 2 if critic == "separate" else 1
    plain = policy_gradients(beginning, make_ppo, False, critic=critic)
    again = policy_gradients(beginning, make_ppo, True, critic=critic)
    assert plain[:2] == (passes, passes)
    assert again[:2] == (passes, 2 * passes)  # every block twice: the setting does something
    assert again[2].keys() == plain[2].keys()
    assert max(gradient.abs().max() for gradient in plain[2].values()) > 1e-2
    for name, gradient in plain[2].items():
        bound = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(again[2][name], gradient, atol=bound, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@torch.no_grad()
def test_an_adapter_on_the_vocabulary_matrix_does_not_reach_the_reference(load_sharp, make_ppo, sharp_backbones):
    loaded = load_sharp("tiny-llama", lora_r=2, lora_target_modules="q_proj,lm_head")
    module = make_ppo(loaded).engine.module
    base = make_ppo(load_sharp("tiny-llama")).engine.module
    expected = base("language", PROMPT, RESPONSE)
    torch.testing.assert_close(module(Role.REFERENCE, PROMPT, RESPONSE), expected, atol=1e-6, rtol=0)
    assert (module(Role.LANGUAGE_MODEL, PROMPT, RESPONSE) - expected).abs().max() > 0.01


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
