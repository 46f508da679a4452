"""A moving reference: every N updates the policy is copied into it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from align.models.adapters import adapter_parameters
from align.models.loading import LoadedModel
from align.models.roles import REFERENCE_ADAPTER
from align.runtime.distributed import run_on_all, run_on_main

FILE = "reference.safetensors"
"""The file in a checkpoint with the reference's weights, once it is no longer the starting model."""


class ReferenceRefresh:
    """Copies the policy's weights over the reference's.

    With LoRA the reference is a frozen adapter of its own on the policy's base, otherwise a frozen copy of the model.

    Args:
        every: updates between two refreshes.
        loaded: the policy.
        reference: the frozen copy; None with LoRA.
    """

    def __init__(self, every: int, loaded: LoadedModel, reference: nn.Module | None) -> None:
        self.every, self.moved = every, False
        if reference is None:
            assert loaded.adapter is not None
            self.weights = adapter_parameters(loaded.backbone.model, REFERENCE_ADAPTER)
            trained = adapter_parameters(loaded.backbone.model, loaded.adapter).values()
            self.sources = dict(zip(self.weights, trained, strict=True))
        else:
            self.weights = {name.removeprefix("backbone.model."): weight for name, weight in reference.named_parameters()}
            policy = dict(loaded.backbone.model.named_parameters())
            self.sources = {name: policy[name] for name in self.weights}

    def after_update(self, update: int) -> None:
        """Refresh the reference, if it is its turn after this update."""
        if update % self.every == 0:
            self._copy(self.sources)

    @torch.no_grad()
    def _copy(self, sources: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(sources[name])
        self.moved = True

    def files(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint must hold of the reference: nothing while it is the starting model."""
        return {FILE: {name: weight.detach() for name, weight in self.weights.items()}} if self.moved else {}

    def load(self, checkpoint: Path | None, accelerator: Accelerator) -> None:
        """Restore the reference of a checkpoint on all processes; None: it is the starting model."""
        if checkpoint is None or not run_on_main((checkpoint / FILE).exists, accelerator):
            return
        run_on_all(lambda: self._copy(load_file(checkpoint / FILE)), accelerator)
