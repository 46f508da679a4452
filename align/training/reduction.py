"""The sum of the gradients of all processes, once for each loss."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_BYTES = 25 * 2**20
"""Gradients that travel together: DistributedDataParallel's 25 MiB. A bucket is in memory twice while it is summed."""


class GradientReduction:
    """Sums the gradients of all processes in float32 masters, once for each loss instead of once for each micro-batch."""

    def __init__(self, masters: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.masters = list(masters.values())
        self.buckets: list[list[int]] = []
        size = bucket_bytes
        for number in reversed(range(len(self.masters))):
            if size >= bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(number)
            size += 4 * self.masters[number].numel()
        self._earlier: list[Tensor | None] = []

    def begin(self) -> None:
        """Put the complete gradients of the update's earlier losses aside."""
        self._earlier = [master.grad for master in self.masters]
        for master in self.masters:
            master.grad = None

    def finish(self) -> None:
        """Give each master the sum of its gradients over passes and processes.

        A weight without a gradient on every process has none afterward, as on one process; the engine's step takes 0 for it.
        """
        present = torch.tensor([float(master.grad is not None) for master in self.masters], device=self.masters[0].device)
        torch.distributed.all_reduce(present)
        found = (present > 0).tolist()
        for bucket in self.buckets:
            masters = [self.masters[number] for number in bucket]
            flat = _flatten_dense_tensors([torch.zeros_like(one) if one.grad is None else one.grad for one in masters])
            for master in masters:  # its gradient is in `flat` now
                master.grad = None
            torch.distributed.all_reduce(flat)
            for number, master, total in zip(bucket, masters, _unflatten_dense_tensors(flat, masters), strict=True):
                earlier = self._earlier[number]
                master.grad = (total if earlier is None else earlier.add_(total)) if found[number] else earlier
        self._earlier = []
