"""Sums gradients over processes while the backward pass is still going on, outside DeepSpeed.

As torch's DistributedDataParallel does it (Li et al. 2020, arXiv 2006.15704, section 3.2.3), but for gradients that are
added up in float32 masters over several micro-batches and losses: only the last backward pass of each sum is accompanied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_BYTES = 25 * 2**20
"""Gradients that travel together: DistributedDataParallel's 25 MiB, of which a large model has enough to overlap."""


class GradientReduction:
    """Adds up the gradients of all processes, in buckets that are sent as soon as their last gradient is there.

    All processes send the same buckets in the same order, which begins with the weights that were made last: backward passes
    come to them first.

    Args:
        weights: what the module computes with, by name.
        masters: what holds each weight's gradient once its backward pass is over: the weight itself, or its float32 master.
        bucket_bytes: of float32 gradients in a bucket, at least.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.masters = list(masters.values())
        self.buckets: list[list[int]] = []
        size = bucket_bytes
        for number in reversed(range(len(self.masters))):
            if size >= bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(number)
            size += 4 * self.masters[number].numel()
        self.listens = False
        self.sent: list[tuple[Tensor, Any]] = []
        """Of the buckets so far: the flat sum that is being made, and what to wait for."""
        self._ready: set[int] = set()
        self._found: set[int] = set()
        self._earlier: list[Tensor | None] = []
        for number, weight in enumerate(weights.values()):
            # After the hook that adds the gradient to its master: hooks run in the order in which they were registered.
            weight.register_post_accumulate_grad_hook(lambda _, number=number: self._note(number))

    def begin(self) -> None:
        """Before the passes of a sum: what earlier sums of this update have made is complete, and is put aside."""
        self._earlier = [master.grad for master in self.masters]
        for master in self.masters:
            master.grad = None

    def listen(self) -> None:
        """Before the last backward pass: from now on a gradient that is there is complete."""
        self.listens = True

    def _note(self, number: int) -> None:
        if not self.listens:
            return
        self._ready.add(number)
        while len(self.sent) < len(self.buckets) and self._ready.issuperset(self.buckets[len(self.sent)]):
            self._send(self.buckets[len(self.sent)])

    def _send(self, bucket: list[int]) -> None:
        masters = [self.masters[number] for number in bucket]
        self._found.update(number for number in bucket if self.masters[number].grad is not None)
        flat = _flatten_dense_tensors([torch.zeros_like(one) if one.grad is None else one.grad for one in masters])
        for master in masters:  # its gradient is in `flat` now
            master.grad = None
        self.sent.append((flat, torch.distributed.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """After the last backward pass: wait until each master has the sum of its gradients over passes and processes.

        A weight that no process has a gradient of has none afterward: its optimizer step is left out, as on one process.
        """
        for bucket in self.buckets[len(self.sent) :]:
            self._send(bucket)
        present = torch.zeros(len(self.masters), device=self.masters[0].device)
        present[list(self._found)] = 1.0
        torch.distributed.all_reduce(present)
        found = (present > 0).tolist()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            masters = [self.masters[number] for number in bucket]
            for number, master, total in zip(bucket, masters, _unflatten_dense_tensors(flat, masters), strict=True):
                earlier = self._earlier[number]
                master.grad = (total if earlier is None else earlier.add_(total)) if found[number] else earlier
        self.listens, self.sent = False, []
        self._ready.clear()
        self._found.clear()
        self._earlier = []
