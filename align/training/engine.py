"""The engine that trains a module: float32 master weights, gradient accumulation, and the optimizer's step.

One optimizer step:

    for batch in micro_batches(...):
        engine.backward(some_loss(model, batch), batch.weight)  # a variable would keep the graph alive
    metrics = engine.reduce_gradients()  # over all processes
    metrics |= engine.step(update)

Losses are already divided by global counts, so the engine only adds gradients. Padding, micro-batch size and the number of
processes never change a gradient. A "master" is the float32 copy of a bfloat16 weight that the optimizer updates.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from align.core.errors import UserError
from align.core.tensor_ops import BatchLoss
from align.runtime.distributed import sum_across_processes
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
    scheduled_groups,
)
from align.training.run import Run


class NotFiniteError(UserError):
    """A loss or a gradient became NaN or infinite; the update was not applied."""


class TrainEngine:
    """The trainable weights of one module under one optimizer.

    Weights in bfloat16 have float32 masters, which keep small updates: a gradient is added to its master's as soon as it is
    complete, and then dropped.

    Args:
        module: module with all trained weights. Weights that require no gradient do not change.
        total_steps: number of optimizer steps, for the schedule of the learning rate.
        groups: weights with another learning rate than `learning_rate` from the first update.
        average_decay: decay of the exponential moving average of the weights. 0 disables it.

    Attributes:
        trainable: the trained weights of `module` by name.
        masters: their float32 copies, or the weights themselves.
        average: moving average of the masters, if enabled.
    """

    module: Any
    reduction: GradientReduction | None = None
    keeps_shards = False
    """Whether `state` returns this process's parts of tensors instead of full tensors."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        total_steps: int,
        groups: Sequence[ParamGroup] = (),
        average_decay: float = 0.0,
    ) -> None:
        self.run, self.accelerator, self.total_steps = run, run.accelerator, total_steps
        self._totals: dict[str, Tensor | float] = {}
        self.module = module.to(run.accelerator.device)
        self.trainable = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.masters = {name: make_master(weight) for name, weight in self.trainable.items()}
        self.drop_gradients()  # of an earlier use of the module
        self.groups = complete_groups(run.optimization.learning_rate, self.trainable, groups)
        self.optimizer = build_optimizer(run.optimization, self.masters, self.groups)
        self.average = WeightAverage(self.masters, average_decay) if average_decay else None
        if self.accelerator.num_processes > 1:
            self.reduction = GradientReduction(self.masters)

    def backward(self, loss: BatchLoss, weight: float = 1.0) -> None:
        """Accumulate the gradients and metrics of a micro-batch since the last `reduce_gradients`.

        On one process, a requested stop ends the run here if the update has not changed a weight yet.

        Args:
            loss: the micro-batch's contribution to the global loss.
            weight: factor of the loss and the metrics, see `MicroBatch`.
        """
        if not self._totals and self.reduction:
            self.reduction.begin()
        if self.accelerator.num_processes == 1:  # several processes agree in `reduce_gradients`
            self.run.raise_if_stop_requested(self.drop_gradients)
        self._backward(loss.loss * weight)
        for name, value in {"loss": loss.loss, **loss.sums}.items():
            share = (value.detach().double() if isinstance(value, Tensor) else value) * weight
            self._totals[name] = self._totals[name] + share if name in self._totals else share

    def reduce_gradients(self) -> dict[str, float]:
        """Sum gradients over processes; return `loss` and metrics, summed over micro-batches and processes.

        Further calls of `backward` add to these gradients until the next `step`. A requested stop ends the run here if the
        update has not changed a weight yet.

        Raises:
            NotFiniteError: if the loss is not finite on any process. The gradients are dropped.
        """
        if self.reduction:
            self.reduction.finish()
        sums = self._sums_of_all_processes()
        self._totals = {}
        if not math.isfinite(sums["loss"]):
            self.drop_gradients()
            raise NotFiniteError("the loss is not a finite number")
        self.run.raise_if_stop_requested(self.drop_gradients)
        return sums

    def step(self, number: int, frozen: Collection[str] = ()) -> dict[str, float]:
        """Apply the gradients of step `number`, counted from 1; return learning rates and `grad_norm` before clipping.

        Args:
            frozen: names of groups whose learning rate is 0 in this step.

        Raises:
            NotFiniteError: if the gradient norm is not finite. Nothing is updated.
        """
        rates = {
            group.metric: 0.0 if group.name in frozen else group.rate(self.run.optimization, number, self.total_steps)
            for group in self.groups
        }
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["metric"]]
        self.run.weights_changed()
        return rates | {"grad_norm": self._apply()}

    def use_optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Train with another optimizer, and take learning rates from its groups instead of the settings.

        Args:
            optimizer: optimizer over all trained weights. Default: the engine's optimizer.

        Raises:
            UserError: if the engine is DeepSpeed's, or the optimizer lacks a trained weight.
        """
        if optimizer is not None:
            self._require_all_weights(optimizer)
            self.optimizer = optimizer
        self.groups = scheduled_groups(self.optimizer)

    def _require_all_weights(self, optimizer: torch.optim.Optimizer) -> None:
        if self.accelerator.state.deepspeed_plugin is not None:
            raise UserError("optimizers: DeepSpeed builds its optimizer from the settings; leave `optimizers` out")
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        missing = sorted(name for name, master in self.masters.items() if id(master) not in held)
        if missing:
            raise UserError(
                f"optimizers: the optimizer lacks {len(missing)} of {len(self.masters)} trained weights, such as "
                f"'{missing[0]}': it must hold all weights of the policy (of a PeftModel: of its adapter) and of a "
                "value_model, in float32"
            )

    def _apply(self) -> float:
        for master in self.masters.values():
            if master.grad is None:
                # Step every weight, as DeepSpeed's flat groups do, so that moments and weight decay are the same everywhere.
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
        self._totals = {}
        for tensor in (*self.masters.values(), *self.trainable.values()):
            tensor.grad = None

    def _sums_of_all_processes(self) -> dict[str, float]:
        device, names = self.accelerator.device, sorted(self._totals)
        values = [torch.as_tensor(self._totals[name], dtype=torch.float64, device=device).reshape(()) for name in names]
        return dict(zip(names, sum_across_processes(torch.stack(values), self.accelerator).tolist(), strict=True))

    def copy_masters_to_weights(self) -> None:
        """Round the masters to the model's weights. After `load_state`, call this on all processes."""
        copy_weights(self.masters, self.trainable)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Use the average of the module's weights in this context, if enabled."""
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
                    # bitsandbytes shares its 8-bit tables, and safetensors rejects shared memory.
                    tensors[f"{key}/{name}"] = value.clone() if key.startswith("qmap") else value
                elif value is not None:
                    numbers[f"{key}/{name}"] = value
        return tensors, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Restore the output of `state`, in place. Each process reads only its part, without communication.

        Raise a UserError if names or shapes differ from this module's, as with a checkpoint of another model or settings.
        """
        stored = tensors.shapes if isinstance(tensors, StoredState) else _shapes(tensors)
        require_same_weights(stored, _shapes(self.masters))
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master/{name}"])
                if self.average:  # an average that was not kept before starts here
                    self.average.values[name].copy_(tensors.get(f"{AVERAGE}/{name}", master))
        for stored_values in (tensors, numbers):
            for path in stored_values:
                key, name = path.split("/", 1)
                if key not in ("master", AVERAGE):
                    value, master = stored_values[path], self.masters[name]
                    restored = value.to(master.device, copy=True) if isinstance(value, Tensor) else value
                    self.optimizer.state[master][key] = restored

    def model_state(self) -> dict[str, Tensor]:
        """Return all weights of the module, unsharded, for saving."""
        return dict(self.module.state_dict())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}
