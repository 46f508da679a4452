"""The weights and the optimizer of an engine as checkpoints, evaluations and saved models see them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from align.training.checkpoint.state import AVERAGE, FlatTensorSlice, require_same_weights, shapes_of
from align.training.optimizer import WeightAverage


class EngineState:
    """The state of a `TrainEngine`, which makes the attributes.

    Attributes:
        trainable: the trained weights of `module` by name.
        masters: their float32 copies, or they themselves.
        average: the mean of the masters, if one is kept.
        keeps_shards: whether `state` holds this process's parts of tensors, and not whole ones.
    """

    module: Any
    optimizer: torch.optim.Optimizer
    trainable: Mapping[str, nn.Parameter]
    masters: Mapping[str, Tensor]
    average: WeightAverage | None = None
    keeps_shards = False

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has made its state."""
        return bool(self.optimizer.state)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """While this lasts the module computes with the mean of its weights, if one is kept."""
        return self.average.in_place_of(self.trainable) if self.average else nullcontext()

    def state(self) -> tuple[Mapping[str, Tensor | FlatTensorSlice], dict[str, float]]:
        """Masters and optimizer state as tensors, whole or this process's part of them, and numbers, by name."""
        tensors: dict[str, Tensor | FlatTensorSlice] = {
            f"master/{name}": master.detach() for name, master in self.masters.items()
        }
        tensors |= {f"{AVERAGE}/{name}": value for name, value in (self.average.values if self.average else {}).items()}
        numbers: dict[str, float] = {}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = value
                elif value is not None:
                    numbers[f"{key}/{name}"] = value
        return tensors, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Restore what `state` returned. Each process reads its part, and exchanges nothing.

        Raises:
            UserError: if names or shapes differ from this module's: a checkpoint of another model or other settings.
        """
        require_same_weights(tensors, shapes_of(self.masters))
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master/{name}"])
                self.trainable[name].copy_(master)
                if self.average:  # one that was not kept before starts from here
                    self.average.values[name].copy_(tensors.get(f"{AVERAGE}/{name}", master))
        for stored in (tensors, numbers):
            for path in stored:
                key, name = path.split("/", 1)
                if key not in ("master", AVERAGE):
                    value = stored[path]
                    kept = value.to(self.masters[name].device, copy=True) if isinstance(value, Tensor) else value
                    self.optimizer.state[self.masters[name]][key] = kept

    def compute_with_masters(self) -> None:
        """After `load_state` on all processes: bring the masters to the weights that compute, where processes share them."""

    def model_state(self) -> dict[str, Tensor]:
        """All weights of the module, unsharded, for saving."""
        return dict(self.module.state_dict())
