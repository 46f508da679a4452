"""The engine that trains a module: float32 master weights, gradient accumulation, and the optimizer's step.

A loop over one optimizer step reads:

    for rows in engine.micro_batches(plan):
        engine.backward(*some_loss(model, rows))  # a name would keep its graph in memory while the next one is made
    metrics = engine.step(update)

`plan` lists this process's micro-batches (`MicroBatch`), `rows` are the row numbers of one. A loss comes with metrics,
which add up. Losses are already divided by global counts, so the engine only adds them up. Padding, micro-batches and the
number of processes never change a gradient. A "master" is the float32 copy of a bfloat16 weight that the optimizer updates.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from align.batches.micro_batches import MicroBatch
from align.core.errors import UserError
from align.runtime.distributed import sum_across_processes
from align.runtime.flops import Clock
from align.training.checkpoint.state import AVERAGE, FlatTensorSlice, StoredState, require_same_weights
from align.training.optimizer import (
    GradientReduction,
    ParamGroup,
    WeightAverage,
    build_optimizer,
    complete_groups,
    copy_weights,
    gradients_to_masters,
    make_master,
)
from align.training.run import Run

Sums = Mapping[str, Tensor | float]
"""Metrics of a micro-batch as scalars that add up over micro-batches and processes."""


class NotFiniteError(UserError):
    """A loss or a gradient became NaN or infinite; the update was not applied."""


class TrainEngine:
    """The trainable weights of one module under one optimizer.

    Weights in bfloat16 have float32 masters, which keep small updates: a gradient is added to its master's as soon as it is
    complete, and then dropped.

    Args:
        module: contains all trained weights; weights that require no gradient do not change.
        total_steps: number of optimizer steps, for the schedule of the learning rate.
        groups: weights whose learning rate is not `learning_rate` from the first update on.
        average_decay: of the exponential mean of the weights; 0: no mean is kept.

    Attributes:
        clock: ends its laps `learn` and `step` in each step. `EpochLoop` replaces it in each update; PPO has another clock.
        trainable: the trained weights of `module` by name.
        masters: their float32 copies, or they themselves.
        average: the mean of the masters, if one is kept.
        sums: the loss and the metrics of the last `micro_batches`, summed over micro-batches and processes.
    """

    module: Any
    reduction: GradientReduction | None = None
    keeps_shards = False
    """Whether `state` returns this process's parts of tensors, not whole ones."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        total_steps: int,
        groups: Sequence[ParamGroup] = (),
        average_decay: float = 0.0,
    ) -> None:
        self.run, self.accelerator, self.total_steps, self.clock = run, run.accelerator, total_steps, Clock()
        self._loss_weight, self._totals = 1.0, dict[str, Tensor | float]()
        self.module = module.to(run.accelerator.device)
        self.trainable = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.masters = {name: make_master(weight) for name, weight in self.trainable.items()}
        self.drop_gradients()  # of an earlier use of the module
        self.groups = complete_groups(run.optimization.learning_rate, self.trainable, groups)
        self.optimizer = build_optimizer(run.optimization, self.masters, self.groups)
        self.average = WeightAverage(self.masters, average_decay) if average_decay else None
        if self.accelerator.num_processes > 1:
            self.reduction = GradientReduction(self.masters)

    def micro_batches(self, plan: Sequence[MicroBatch]) -> Iterator[list[int]]:
        """Yield the rows of each of this process's micro-batches, whose loss the caller passes to `backward`.

        After the last one, gradients and `sums` are complete on every process. The gradients of several such loops add up
        until the next `step`. A requested stop ends the run here, as long as the update has changed no weight. Raise a
        NotFiniteError if the loss is not a number on any process; the gradients are dropped.
        """
        self._totals = {}
        if self.reduction:
            self.reduction.begin()
        for batch in plan:
            if self.accelerator.num_processes == 1:  # several must agree, which they do below
                self.run.raise_if_stop_requested(self.drop_gradients)
            self._loss_weight = batch.loss_weight
            yield batch.rows
        if self.reduction:
            self.reduction.finish()
        self.sums = self._sums_of_all_processes()
        if not math.isfinite(self.sums["loss"]):
            self.drop_gradients()
            raise NotFiniteError("the loss is not a finite number")
        self.run.raise_if_stop_requested(self.drop_gradients)

    def backward(self, loss: Tensor, sums: Sums | None = None) -> None:
        """Add the gradients of the current micro-batch and its metrics: its shares of the global loss and `sums`."""
        weight = self._loss_weight
        self._backward(loss * weight)
        for name, value in {"loss": loss, **(sums or {})}.items():
            share = (value.detach().double() if isinstance(value, Tensor) else value) * weight
            self._totals[name] = self._totals[name] + share if name in self._totals else share

    def step(self, number: int, frozen: Collection[str] = ()) -> dict[str, float]:
        """Apply the gradients of step `number`, from 1; return the learning rates and `grad_norm` (before clipping).

        The learning rate of the groups named in `frozen` is 0 in this step. Raise a NotFiniteError if the gradient norm is
        not finite; nothing was updated.
        """
        rates = {
            group.metric: 0.0 if group.name in frozen else group.rate(self.run.optimization, number, self.total_steps)
            for group in self.groups
        }
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["metric"]]
        self.run.weights_changed()
        self.clock.lap("learn")
        norm = self._apply()
        self.clock.lap("step")
        return rates | {"grad_norm": norm}

    def _apply(self) -> float:
        for master in self.masters.values():
            if master.grad is None:
                # DeepSpeed's flat groups step every weight. Here too: moments and weight decay are then the same everywhere.
                master.grad = torch.zeros_like(master)
        limit = self.run.optimization.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), limit))
        if not math.isfinite(norm):
            self.drop_gradients()
            raise NotFiniteError("the gradient is not a finite number")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copy_masters_to_weights()
        if self.average:
            self.average.add(self.masters)
        return norm

    def _backward(self, loss: Tensor) -> None:
        with gradients_to_masters(self.trainable, self.masters):
            loss.backward()

    def drop_gradients(self) -> None:
        """Discard accumulated gradients: a NaN must not reach the next update if the caller continues."""
        for tensor in (*self.masters.values(), *self.trainable.values()):
            tensor.grad = None

    def _sums_of_all_processes(self) -> dict[str, float]:
        device, names = self.accelerator.device, sorted(self._totals)
        values = [torch.as_tensor(self._totals[name], dtype=torch.float64, device=device).reshape(()) for name in names]
        return dict(zip(names, sum_across_processes(torch.stack(values), self.accelerator).tolist(), strict=True))

    def copy_masters_to_weights(self) -> None:
        """Round the masters to the weights that compute. After `load_state`, call this on all processes."""
        copy_weights(self.masters, self.trainable)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Let the module compute with the mean of its weights inside, if one is kept."""
        return self.average.in_place_of(self.trainable) if self.average else nullcontext()

    def state(self) -> tuple[Mapping[str, Tensor | FlatTensorSlice], dict[str, float]]:
        """Return masters and optimizer state by name: tensors, or this process's parts of them, and numbers."""
        tensors = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        if self.average:
            tensors |= {f"{AVERAGE}/{name}": value for name, value in self.average.values.items()}
        numbers: dict[str, float] = {}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = value
                elif value is not None:
                    numbers[f"{key}/{name}"] = value
        return tensors, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Restore what `state` returned, in place. Each process reads its part, and exchanges nothing.

        Raise a UserError if names or shapes differ from this module's: a checkpoint of another model or other settings.
        """
        stored = tensors.shapes if isinstance(tensors, StoredState) else _shapes(tensors)
        require_same_weights(stored, _shapes(self.masters))
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master/{name}"])
                if self.average:  # one that was not kept before starts from here
                    self.average.values[name].copy_(tensors.get(f"{AVERAGE}/{name}", master))
        for each in (tensors, numbers):
            for path in each:
                key, name = path.split("/", 1)
                if key not in ("master", AVERAGE):
                    value, master = each[path], self.masters[name]
                    kept = value.to(master.device, copy=True) if isinstance(value, Tensor) else value
                    self.optimizer.state[master][key] = kept

    def model_state(self) -> dict[str, Tensor]:
        """Return all weights of the module, unsharded, for saving."""
        return dict(self.module.state_dict())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}
