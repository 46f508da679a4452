"""A micro-batch gone through on tensors that have shapes and no data, to count the memory that it would hold.

torch's fake tensors know sizes and where they live, but hold nothing: a pass costs a second whatever its size, and what is
counted is what the code does, for every architecture, with adapters and with gradient checkpointing.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from align.models.backbone import Backbone
from align.tensor_ops import entropy_of, log_probs_of


class Reading(NamedTuple):
    """One role that reads a micro-batch."""

    backbone: Backbone
    adapter: str | None
    predicts: bool
    """Whether it takes logits: a critic and a reward model do not."""


class Rows(NamedTuple):
    """The size of a micro-batch: prompts, each with its responses."""

    prompts: int
    prompt: int
    responses: list[int]
    predicted: int
    """Tokens whose logits are taken, over all rows."""

    @classmethod
    def of(cls, batch: Sequence[tuple[int, Sequence[int]]], predicted: int | None = None) -> "Rows":
        """Of prompts and responses with these lengths; `predicted`: all response tokens, unless told otherwise."""
        prompt, widest = max((length, len(responses)) for length, responses in batch)
        longest = max(length + max(responses) for length, responses in batch)
        tokens = sum(sum(responses) for _, responses in batch)
        return cls(len(batch), prompt, [longest - prompt] * widest, tokens if predicted is None else predicted)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, and the most that were alive at once.

    Args:
        known: tensors whose memory is counted elsewhere; views of them are free.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                storage = tensor.untyped_storage()
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return found

    def _forget(self, storage: int, size: int) -> None:
        self.alive.discard(storage)
        self.now -= size


class _Rehearsal(nn.Module):
    """All backbones of a pass under one roof, so that their weights can be replaced by tensors without data."""

    def __init__(self, backbones: Sequence[Backbone], work: Callable[[], None]) -> None:
        super().__init__()
        self.backbones, self.work = nn.ModuleList(backbones), work

    def forward(self) -> None:
        self.work()


def pass_bytes(readings: Sequence[Reading], rows: Rows, learn: bool) -> int:
    """The most bytes that one pass over `rows` holds at once, beside weights and their whole gradients.

    Args:
        readings: roles that read the rows one after another; when learning, they share one backward pass.
        learn: with a backward pass; else without gradients, and with the entropy of what is predicted.
    """
    backbones = list({id(reading.backbone): reading.backbone for reading in readings}.values())
    live: list[LiveBytes] = []

    def work() -> None:
        with live[0], torch.set_grad_enabled(learn):
            total: Tensor | None = None
            for reading in readings:
                loss = _loss(reading, rows, learn)
                total = loss if total is None or not learn else total + loss
            if learn and total is not None:
                total.backward()

    rehearsal = _Rehearsal(backbones, work)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        weights: dict[str, Tensor] = {name: mode.from_tensor(weight) for name, weight in rehearsal.named_parameters()}
        for weight in weights.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(_drop_gradient)
        live.append(LiveBytes(list(weights.values())))
        torch.func.functional_call(rehearsal, weights, ())
    return live[0].peak


def _loss(reading: Reading, rows: Rows, learn: bool) -> Tensor:
    with reading.backbone.adapter(reading.adapter):
        hidden = reading.backbone.rehearse(rows.prompts, rows.prompt, rows.responses)
        if not reading.predicts:
            return hidden.float().sum()
        states = hidden[: rows.predicted]
        logits = reading.backbone.logits(states)
        found = log_probs_of(logits, torch.zeros(len(states), dtype=torch.long, device=states.device))
        if not learn:
            found = found + entropy_of(logits)
        return found.sum()


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None
