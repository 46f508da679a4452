"""Which norms torch's kernel replaces on a GPU; tests/gpu compares the numbers there."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from align.models.backbone.norms import fuse_norms, norm_in_one_kernel
from tests.models.architectures import make_model


def fused(model):
    """The names of the replaced modules."""
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Llama 1, 2", 5),  # two of each layer, and the last one
        ("Qwen 3", 9),  # and those of queries and keys
        ("T5 v1.0", 12),
        ("GPT-2", 0),  # a mean and a bias
        ("Gemma", 0),  # 1 + weight
    ],
)
def test_plain_norms_alone_are_replaced(name, count):
    model = make_model(name)
    fuse_norms(model)
    assert len(fused(model)) == count
    before = fused(model)
    fuse_norms(model)
    assert fused(model) == before


def test_a_processor_computes_the_same_bits():
    model, ids = make_model("Qwen 3"), torch.arange(8, 20)[None]
    expected = model(ids).logits
    fuse_norms(model)
    assert torch.equal(model(ids).logits, expected)


def test_a_copy_reads_its_own_weights():
    model = make_model("Llama 1, 2")
    fuse_norms(model)
    copied, ids = copy.deepcopy(model), torch.arange(8, 20)[None]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert not torch.equal(copied(ids).logits, model(ids).logits)


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_computes_what_the_module_does(dtype):
    norm = make_model("Llama 1, 2").model.norm.to(dtype)
    nn.init.normal_(norm.weight)
    states = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    calls = []
    found = norm_in_one_kernel(norm, lambda read: calls.append(read) or norm(read), states.as_subclass(OnGPU))
    assert not calls
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.as_subclass(torch.Tensor), norm(states), rtol=tolerance, atol=tolerance)
    assert torch.equal(found, rms_norm(states, (32,), norm.weight, norm.variance_epsilon))


def test_states_in_another_format_than_the_weight_are_left_to_the_module():
    norm = make_model("Llama 1, 2").model.norm
    states = torch.randn(2, 32, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert norm_in_one_kernel(norm, lambda read: "its own", states) == "its own"


@pytest.mark.parametrize("kind", [torch.Tensor, OnGPU])
def test_a_gate_is_left_to_the_module(kind):
    norm = FalconH1RMSNormGated(32)
    states, gate = torch.randn(2, 2, 3, 32, generator=torch.Generator().manual_seed(0))
    expected = norm(states, gate)
    fuse_norms(norm)
    assert "forward" in vars(norm)  # without a gate it is plain
    assert torch.equal(norm(states.as_subclass(kind), gate), expected)


def test_a_model_without_data_is_replaced_alike():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_model("Llama 1, 2").config)
        fuse_norms(model)
    assert len(fused(model)) == 5
