"""Mixtures of experts: routers multiply in float32 and get no adapter, and PPO's ratio starts at 1."""

import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.model_registry.tiny import byte_tokenizer
from align.models.backbone import wrap
from align.models.backbone.determinism import routers_of
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from tests.files import metrics_of, write_rows
from tests.models.architectures import make_model

MIXTRAL, SWITCH = "Mixtral, experts", "Switch, experts"


@pytest.mark.parametrize("name", [MIXTRAL, "OLMoE, experts", "Qwen 3 MoE, experts"])
def test_routers_multiply_in_float32(name):
    model = make_model(name).to(torch.bfloat16)
    backbone = wrap(model)
    router = routers_of(model)[0].module
    states = torch.randn(64, 32).to(torch.bfloat16)
    logits, scores, _ = router(states)
    assert (logits.dtype, scores.dtype, router.weight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    expected = states.double() @ router.weight.double().T
    torch.testing.assert_close(logits.double(), expected, atol=1e-6, rtol=1e-6)
    backbone.hidden(Padded.from_lists([[5, 6, 7], [8, 9]]), Padded.from_lists([[20, 21, 22], [24]])).float().sum().backward()
    assert router.weight.grad.abs().max() > 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name in (MIXTRAL, SWITCH):
        folder = tmp_path_factory.mktemp("experts")
        model = make_model(name)
        with torch.no_grad():  # routers that prefer one expert
            for router in routers_of(model):
                weight = next(router.module.parameters())
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
        model.save_pretrained(folder)
        byte_tokenizer(append_eos=name == SWITCH).save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [MIXTRAL, SWITCH])
def test_sampling_sends_tokens_to_the_experts_that_training_does(name, folders, tmp_path):
    """Otherwise the ratio at the first minibatch would not be 1."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi " * number} for number in (1, 2, 3, 5)])
    settings = {"model": folders[name], "dtype": "float32", "report_to": ["none"], "max_prompt_tokens": 64}
    settings |= {"prompts": prompts, "rollout_batch_size": 4, "num_mini_batches": 1, "num_ppo_epochs": 1}
    settings |= {"total_updates": 1, "max_new_tokens": 6}
    run_ppo(PPOConfig(**settings, reward_functions=["align.ppo.toy_rewards:brevity"], output_dir=str(tmp_path / "ppo")))
    assert metrics_of(tmp_path / "ppo")[0]["ratio/abs_error"] < 1e-5


def test_no_adapter_goes_onto_a_router(folders):
    for name in (MIXTRAL, SWITCH):
        config = ModelConfig(model=folders[name], lora_r=2)
        adapted = {key for key, _ in load(config, torch.float32).backbone.model.named_parameters() if "lora_A" in key}
        assert adapted
        assert not [key for key in adapted if "router" in key or "gate." in key]
        assert (name == SWITCH) == any("experts" in key for key in adapted)
