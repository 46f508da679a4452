"""Modules small enough to work out by hand, and one update of them."""

import torch
from safetensors.torch import save_file
from torch import nn

from align.batches.micro_batches import MicroBatch
from align.core.tensor_ops import BatchLoss
from align.training.checkpoint.state import tensors_of_shards


class Weights(nn.Module):
    """Bare weights: a list of tensors, each a parameter."""

    def __init__(self, *tensors):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(tensor.clone()) for tensor in tensors])


def vector(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


def accumulate(engine, plan, loss):
    """Add up the gradients of a loss (a tensor and sums) over micro-batches; returns the sums."""
    for batch in plan:
        engine.backward(BatchLoss(*loss(batch.rows)), batch.weight)
    return engine.reduce_gradients()


class Kept:
    """A part of checkpoints whose state is what it is given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def step(engine, *gradients, update=1):
    """One update with the given gradients: the loss is the product of weights and gradients."""

    def loss(_):
        weights = engine.module.w
        return sum((w.float() * g).sum() for w, g in zip(weights, gradients, strict=True)), {}

    accumulate(engine, [MicroBatch([[0]])], loss)
    return engine.step(update)


def regression(dtype):
    """A small regression: a module, and its loss over rows as a share of the whole."""
    rng = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(12, 3, generator=rng), torch.randn(12, 2, generator=rng)
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng))
    module = module.to(dtype)

    def loss(rows):
        errors = module(inputs[rows].to(dtype)).float() - targets[rows]
        return (errors**2).sum() / 12, {"rows": torch.tensor(float(len(rows)))}

    return module, loss


def write_shards(path, parts):
    """The file of a process with its parts of a state."""
    tensors, header = tensors_of_shards(parts)
    save_file(tensors, path, metadata=header)
