"""torch.compile of the layers, which share one graph: the same numbers, forward and backward."""

import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.loading import load

BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
"""On a processor the graph alone is checked: there, generated code would take minutes to compile."""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("smollm2-135m", marks=pytest.mark.gpu)])
def test_compiled_layers_compute_the_same(model, device, sharp_folders):
    torch.manual_seed(0)
    backbone = load(ModelConfig(model=sharp_folders.get(model, model), dtype="float32"), torch.float32).backbone.to(device)
    ids = torch.randint(8, 264, (4, 24), generator=torch.Generator().manual_seed(0)).to(device)
    prompt, response = (Padded(part, torch.full((4,), 12, device=device)) for part in ids.split(12, dim=1))

    def states_and_gradient():
        backbone.zero_grad(set_to_none=True)
        states = backbone.hidden(prompt, response)
        states.square().mean().backward()
        return states.detach(), backbone.model.get_input_embeddings().weight.grad

    expected = states_and_gradient()
    for layer in backbone.model.base_model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKENDS[device.type])
    found = states_and_gradient()
    assert all(torch.allclose(a, b, atol=1e-4 * float(b.abs().max())) for a, b in zip(found, expected, strict=True))
