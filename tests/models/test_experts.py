"""Mixtures of experts: routers multiply in float32 and get no adapter. All stages, and PPO's ratio: test_architectures."""

import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.model_registry.tiny import byte_tokenizer
from align.models.backbone import wrap
from align.models.backbone.determinism import routers_of
from align.models.loading import load
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


@pytest.mark.parametrize("name", [MIXTRAL, SWITCH])
def test_no_adapter_goes_onto_a_router(name, tmp_path):
    make_model(name).save_pretrained(tmp_path)
    byte_tokenizer(append_eos=name == SWITCH).save_pretrained(tmp_path)
    loaded = load(ModelConfig(model=str(tmp_path), lora_r=2), torch.float32)
    adapted = {key for key, _ in loaded.backbone.model.named_parameters() if "lora_A" in key}
    assert adapted
    assert not [key for key in adapted if "router" in key or "gate." in key]
    assert (name == SWITCH) == any("experts" in key for key in adapted)
