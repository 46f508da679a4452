"""DeepSpeed's Adam on the processor goes on to the same bits where an optimizer that was made anew takes over."""

import os

import pytest
import torch
import torch.utils.cpp_extension as torch_extensions

from align.runtime.distributed import prepare_compiling

STEPS = 40


@pytest.mark.slow  # compiles for minutes where nothing has before
def test_an_offloaded_adam_that_takes_over_makes_the_same_steps(monkeypatch):
    monkeypatch.setattr(torch_extensions, "FileBaton", torch_extensions.FileBaton)  # put back afterwards
    monkeypatch.setenv("PATH", os.environ["PATH"])
    prepare_compiling()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from align.training.deepspeed_engine import count_up

    def train(new_before=0, counted=True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(100))
        settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-5}
        optimizer = DeepSpeedCPUAdam([weight], **settings)
        for step in range(1, STEPS + 1):
            if step == new_before:
                state = optimizer.state[weight]
                optimizer = DeepSpeedCPUAdam([weight], **settings)
                optimizer.state[weight] = state
                if counted:
                    count_up(optimizer, step - 1)
            weight.grad = torch.sin(step * weight.detach())
            optimizer.step()
        return weight.detach().clone()

    unbroken = train()
    assert all(torch.equal(train(place), unbroken) for place in range(2, STEPS))
    # What is mended: of the number of a step alone, DeepSpeed takes other powers than it has multiplied up.
    assert any(not torch.equal(train(place, counted=False), unbroken) for place in range(2, STEPS))
