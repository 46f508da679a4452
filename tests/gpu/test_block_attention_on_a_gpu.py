"""FlexAttention as it is compiled for a GPU: states and gradients of shared rows are those of the dense mask."""

import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.loading import load

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the largest: a GPU may multiply float32 as TF32 in the kernel that is made."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "smollm2-135m"])
def test_blocks_compute_what_the_dense_mask_does(model, dtype, device, sharp_folders, record_property):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    backbone = load(ModelConfig(model=sharp_folders.get(model, model)), dtype).backbone.to(device)
    lengths = (torch.tensor([200, 70]), torch.tensor([90, 140, 30, 60, 100]))
    prompt, response = (
        Padded(torch.randint(8, 264, (len(each), int(each.max())), generator=generator), each).to(device) for each in lengths
    )
    owner = torch.tensor([0, 0, 0, 1, 1], device=device)

    def states_and_gradients():
        backbone.zero_grad(set_to_none=True)
        states = backbone.hidden(prompt, response, owner)[:, :-1][response.mask()]
        states.float().square().mean().backward()
        return [states.detach(), *(weight.grad for weight in backbone.parameters() if weight.grad is not None)]

    expected = states_and_gradients()
    backbone.use_block_attention()
    found = states_and_gradients()
    assert len(found) == len(expected) > 1
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(found, expected, strict=True)]
    record_property("largest error", max(errors))
    assert max(errors) <= TOLERANCE[dtype]
