"""Counts the memory of a micro-batch by a dry run on tensors that have shapes and no data.

torch's fake tensors know their sizes and devices but hold nothing: a pass costs a second whatever its size, and it counts
what the code really does, for every architecture, with adapters and with gradient checkpointing.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from align.models.backbone import Backbone, dry_run_states
from align.models.roles import predict_tokens
from align.runtime.sharding import is_sharded, whole_shape


class RolePass(NamedTuple):
    """One role (policy, critic, reward model) that reads a micro-batch."""

    backbone: Backbone
    adapter: str | None
    takes_logits: bool
    """False for a critic and a reward model."""


class BatchShape(NamedTuple):
    """The size of a micro-batch: prompts, each with its responses."""

    prompts: int
    prompt_tokens: int
    response_tokens: list[int]
    """Of each response to one prompt."""
    predicted: int
    """Tokens whose logits are taken, over all rows."""

    @classmethod
    def from_lengths(cls, batch: Sequence[tuple[int, Sequence[int]]], predicted: int | None = None) -> "BatchShape":
        """The shape that prompts and responses of some lengths are padded to.

        Args:
            batch: for each prompt its tokens and those of each of its responses.
            predicted: None: all response tokens.
        """
        prompt, widest = max((length, len(responses)) for length, responses in batch)
        longest = max(length + max(responses) for length, responses in batch)
        tokens = sum(sum(responses) for _, responses in batch)
        return cls(len(batch), prompt, [longest - prompt] * widest, tokens if predicted is None else predicted)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active, and the most that were alive at once.

    Args:
        excluded: tensors whose memory is counted elsewhere; neither they nor views of them count.
    """

    def __init__(self, excluded: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.alive = {tensor.untyped_storage()._cdata for tensor in excluded}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                storage = tensor.untyped_storage()
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, storage: int, size: int) -> None:
        self.alive.discard(storage)
        self.now -= size


class _BackbonesOfPass(nn.Module):
    """All backbones of a pass in one module, so that their weights can be replaced by tensors without data."""

    def __init__(self, backbones: Sequence[Backbone], run_pass: Callable[[], None]) -> None:
        super().__init__()
        self.backbones, self.run_pass = nn.ModuleList(backbones), run_pass

    def forward(self) -> None:
        self.run_pass()


def pass_bytes(role_passes: Sequence[RolePass], shape: BatchShape, backward: bool) -> int:
    """The most bytes that one pass over a micro-batch holds at once, without weights and their accumulated gradients.

    Args:
        role_passes: roles that read the rows one after another; with a backward pass, they share it.
        shape: the size of the micro-batch.
        backward: whether a backward pass follows; without one, the entropy of predictions is taken.
    """
    backbones = list({id(role.backbone): role.backbone for role in role_passes}.values())
    live: list[LiveBytes] = []

    def run_pass() -> None:
        with live[0], torch.set_grad_enabled(backward):
            total: Tensor | None = None
            for role in role_passes:
                loss = _loss(role, shape, backward)
                total = loss if total is None or not backward else total + loss
            if backward and total is not None:
                total.backward()

    module = _BackbonesOfPass(backbones, run_pass)
    with _reading_alone(backbones), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        weights: dict[str, Tensor] = {name: _without_data(mode, weight) for name, weight in module.named_parameters()}
        for weight in weights.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(_drop_gradient)
        live.append(LiveBytes(list(weights.values())))
        torch.func.functional_call(module, weights, ())
    return live[0].peak


def _loss(role: RolePass, shape: BatchShape, backward: bool) -> Tensor:
    with role.backbone.adapter(role.adapter):
        hidden = dry_run_states(role.backbone, shape.prompts, shape.prompt_tokens, shape.response_tokens)
        if not role.takes_logits:
            return hidden.float().sum()
        states = hidden[: shape.predicted]
        tokens = torch.zeros(len(states), dtype=torch.long, device=states.device)
        values, entropy = predict_tokens(role.backbone, states, tokens, with_entropy=not backward)
        return values.sum() if entropy is None else (values + entropy).sum()


@contextmanager
def _reading_alone(backbones: Sequence[Backbone]) -> Iterator[None]:
    """Meanwhile no processes share rows: what has no data cannot be exchanged."""
    groups = [backbone.sequence for backbone in backbones]
    for backbone in backbones:
        backbone.sequence = None
    try:
        yield
    finally:
        for backbone, group in zip(backbones, groups, strict=True):
            backbone.sequence = group


def _without_data(mode: FakeTensorMode, weight: Tensor) -> Tensor:
    """A whole weight's stand-in; the weight itself may be sharded."""
    if not is_sharded(weight):
        return mode.from_tensor(weight)
    whole = torch.empty(whole_shape(weight), dtype=weight.dtype, device=weight.device)
    return whole.requires_grad_(weight.requires_grad)


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None
