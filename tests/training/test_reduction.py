"""Gradients add up over passes, losses and processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from align.training.reduction import GradientReduction


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: a sum over it is the number itself."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("first", "second", "third", "unused")})


def loss_of(module: nn.ModuleDict, rows: torch.Tensor, *names: str) -> torch.Tensor:
    for name in names:
        rows = module[name](rows).tanh()
    return rows.square().sum()


def test_a_second_loss_adds_to_the_first_and_unused_weights_stay_without(group):
    module, plain = layers(), layers()
    weights = dict(module.named_parameters())
    reduction = GradientReduction(weights, bucket_bytes=4 * 16)
    assert reduction.buckets == [[3], [2], [1], [0]], "one weight each, the last first"
    rows = torch.arange(8.0).reshape(2, 4) / 8
    for names in (("first", "second"), ("second", "third")):
        reduction.begin()
        loss_of(module, rows, *names).backward()
        reduction.finish()
        loss_of(plain, rows, *names).backward()
    for name, weight in plain.named_parameters():
        if weight.grad is None:
            assert name == "unused.weight"
            assert weights[name].grad is None
        else:
            assert torch.equal(weights[name].grad, weight.grad), name


def test_gradients_of_bfloat16_weights_are_summed_in_their_masters(group):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    master = weight.detach().float()

    def add_to_master(parameter: torch.Tensor) -> None:
        master.grad, parameter.grad = parameter.grad.float(), None

    weight.register_post_accumulate_grad_hook(add_to_master)
    reduction = GradientReduction({"weight": master})
    reduction.begin()
    (weight * torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16)).sum().backward()
    reduction.finish()
    assert weight.grad is None
    assert master.grad.tolist() == [1.0, 2.0, 4.0]
