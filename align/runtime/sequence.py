"""Sequence parallelism by all-to-all (DeepSpeed Ulysses, Jacobs et al. 2023).

Each process computes a part of every row's tokens, and inside attention a part of the heads over whole rows; all-to-all
exchanges one for the other. DeepSpeed's adapter (0.19.8, `UlyssesSPAttentionHF`) has one batch size for a whole run and
replaces the attention kernel.
"""

from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from align.runtime.distributed import limit_collectives


@dataclass(frozen=True)
class SequenceGroup:
    """The `size` processes that share sequences, with this process at `rank`."""

    size: int
    rank: int
    group: ProcessGroup

    def heads_for_tokens(self, states: Tensor) -> Tensor:
        """[B, heads, L / size, D] of all heads -> [B, heads / size, L, D] of this process's heads."""
        batch, heads, tokens, width = states.shape
        parts = states.view(batch, self.size, heads // self.size, tokens, width).transpose(0, 1)
        # From each process the same heads of its tokens: [size, B, heads / size, L / size, D].
        return self._exchange(parts).permute(1, 2, 0, 3, 4).reshape(batch, heads // self.size, -1, width)

    def tokens_for_heads(self, states: Tensor) -> Tensor:
        """[B, L, heads / size, D] of this process's heads -> [B, L / size, heads, D] of all heads."""
        batch, tokens, heads, width = states.shape
        parts = states.view(batch, self.size, tokens // self.size, heads, width).transpose(0, 1)
        return self._exchange(parts).permute(1, 2, 0, 3, 4).reshape(batch, -1, self.size * heads, width)

    def all_tokens(self, states: Tensor) -> Tensor:
        """[B, L / size, ..] of this process's part -> [B, L, ..] on all of them; backward, gradients are summed."""
        return cast(Tensor, _Gather.apply(states, self))  # type: ignore[no-untyped-call]

    def own_tokens(self, rows: Tensor) -> Tensor:
        """This process's part of [B, L, ..], whose L is a multiple of `size`."""
        length = rows.shape[1] // self.size
        return rows[:, self.rank * length : (self.rank + 1) * length]

    def _exchange(self, parts: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(parts.contiguous(), self.group))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Part i of [size, ..] goes to process i, from which part i of the result comes. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        result = torch.empty_like(parts)
        torch.distributed.all_to_all_single(result, parts, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        result = torch.empty_like(gradient)
        torch.distributed.all_to_all_single(result, gradient, group=ctx.group)
        return result, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        parts = [torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(sequence.size)]
        torch.distributed.all_gather(parts, states.contiguous(), group=sequence.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.sequence.group)
        return ctx.sequence.own_tokens(gradient), None


_groups: "WeakKeyDictionary[Accelerator, SequenceGroup]" = WeakKeyDictionary()


def share_rows(accelerator: Accelerator, size: int) -> SequenceGroup:
    """Let each `size` consecutive ranks share sequences. Collective."""
    for first in range(0, accelerator.num_processes, size):
        group = torch.distributed.new_group(list(range(first, first + size)))
        if first <= accelerator.process_index < first + size:
            _groups[accelerator] = SequenceGroup(size, accelerator.process_index - first, group)
    limit_collectives()
    return _groups[accelerator]


def sequence_size(accelerator: Accelerator) -> int:
    """Return the number of processes per sequence, 1 without sequence parallelism."""
    group = _groups.get(accelerator)
    return group.size if group else 1
