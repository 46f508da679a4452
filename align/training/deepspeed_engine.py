"""`TrainEngine` on a DeepSpeed engine: ZeRO 1, 2 and 3, with or without offload.

Each process writes and reads its part of the state, in one format for all stages and numbers of processes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from align.core.errors import UserError
from align.runtime.distributed import limit_collectives, zero_stage
from align.runtime.sharding import full_numel, full_shape, gather_chosen_parts_together, is_sharded
from align.training.checkpoint.state import AVERAGE, FlatTensorSlice, StoredState, require_same_weights
from align.training.engine import NotFiniteError, TrainEngine
from align.training.optimizer import ParamGroup, WeightAverage, build_optimizer, complete_groups
from align.training.run import Run

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(TrainEngine):
    """Trainable weights under a DeepSpeed engine, which shards the float32 masters. Adafactor's state cannot be sharded."""

    module: Any
    """The engine; DeepSpeed ships no types."""
    keeps_shards = True

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        total_steps: int,
        groups: Sequence[ParamGroup] = (),
        average_decay: float = 0.0,
    ) -> None:
        if run.optimization.optimizer != "adamw":
            raise UserError(f"optimizer {run.optimization.optimizer}: not possible under DeepSpeed; use adamw")
        self.run, self.accelerator, self.total_steps = run, run.accelerator, total_steps
        self._totals = {}
        if run.dtype == torch.bfloat16 and any(map(is_sharded, module.parameters())):
            # The engine accepts a module that was loaded sharded; new heads and adapters are in float32.
            for weight in module.parameters():
                if not is_sharded(weight):
                    weight.data = weight.data.to(run.dtype)
        self.trainable = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.groups = complete_groups(run.optimization.learning_rate, self.trainable, groups)
        optimizer = build_optimizer(run.optimization, self.trainable, self.groups)
        gather_chosen_parts_together(module)
        self.module, self.optimizer = run.accelerator.prepare(module, optimizer)
        limit_collectives()
        self._make_states()
        self.average = WeightAverage(self._shards(), average_decay) if average_decay else None

    def _shards(self) -> dict[str, Tensor]:
        engine = self.module.optimizer
        # In bfloat16, DeepSpeed runs ZeRO-1 with another class, `BF16_Optimizer`.
        flats = getattr(engine, "single_partition_of_fp32_groups", None) or engine.fp32_groups_flat_partition
        return {str(number): flat.data for number, flat in enumerate(flats)}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        if self.average is None:
            yield
            return
        with self.average.in_place_of(self._shards()):
            self.module.optimizer.update_lp_params()  # from the masters to the weights that compute, on every process
            yield
        self.module.optimizer.update_lp_params()

    def _backward(self, loss: Tensor) -> None:
        # The engine averages gradients over processes, but losses are parts of a sum.
        self.module.backward(loss * self.accelerator.num_processes)

    def _apply(self) -> float:
        self.module.step()
        norm = float(self.module.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise NotFiniteError("the gradient is not a finite number")
        self._clear_partitions()
        if self.average:
            self.average.add(self._shards())
        return norm

    def _clear_partitions(self) -> None:
        """Set ZeRO-3's gradient partitions to 0: DeepSpeed keeps the last gradient of a weight that a step does not use."""
        engine = self.module.optimizer
        if (buffer := getattr(engine, "grad_partitions_flat_buffer", None)) is not None:
            buffer.zero_()
            for flat in engine.fp32_partitioned_groups_flat:  # has gradients if the optimizer is offloaded
                if flat.grad is not None:
                    flat.grad.zero_()

    def _make_states(self) -> None:
        """Create the moments of every flat shard before the first step, for reading and writing."""
        engine, inner = self.module.optimizer, self.module.optimizer.optimizer
        of_groups = [flat for group in inner.param_groups for flat in group["params"]]
        for flat in getattr(engine, "fp32_partitioned_groups_flat", of_groups):  # the former is ZeRO-3's
            step = torch.zeros((), device=flat.device) if isinstance(inner, torch.optim.AdamW) else 0
            inner.state[flat] = {"step": step} | {key: torch.zeros_like(flat) for key in MOMENTS}
        if hasattr(engine, "_lazy_init_hp_params_optimizer_state"):
            engine._hp_optimizer_states_linked = False
            engine._lazy_init_hp_params_optimizer_state()

    def _set_steps(self, count: float) -> None:
        for state in self.module.optimizer.optimizer.state.values():
            step = state["step"]
            state["step"] = torch.full_like(step, count) if isinstance(step, Tensor) else int(count)
        if isinstance(self.module.optimizer.optimizer, DeepSpeedCPUAdam):
            count_up(self.module.optimizer.optimizer, int(count))

    def drop_gradients(self) -> None:
        self._totals = {}
        self.module.zero_grad()
        self.module.optimizer.zero_grad()  # the float32 sums of ZeRO-1
        self._clear_partitions()

    def state(self) -> tuple[Mapping[str, Tensor | FlatTensorSlice], dict[str, float]]:
        """Return this process's parts of masters and moments, without gathering."""
        tensors: dict[str, Tensor | FlatTensorSlice] = {}
        for name, weight in self.trainable.items():
            own = {"master" if key is None else key: _local_shard(weight, key) for key in (None, *MOMENTS)}
            tensors |= {f"{key}/{name}": part for key, part in own.items() if part is not None}
        if self.average:
            with self.average.in_place_of(self._shards()):
                for name, weight in self.trainable.items():
                    if (part := _local_shard(weight)) is not None:
                        tensors[f"{AVERAGE}/{name}"] = part._replace(values=part.values.clone())
        if self.run.is_main:
            steps = [float(state["step"]) for state in self.module.optimizer.optimizer.state.values()]
            tensors |= {f"step/{name}": torch.tensor(max(steps, default=0.0)) for name in self.trainable}
        return tensors, {}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        assert isinstance(tensors, StoredState)
        require_same_weights(tensors.shapes, {name: tuple(full_shape(weight)) for name, weight in self.trainable.items()})
        if self.average:  # an average that was not kept before starts here
            for name, weight in self.trainable.items():
                kept = f"{AVERAGE}/{name}" in tensors.shapes
                _set_local_shard(weight, tensors, f"{AVERAGE if kept else 'master'}/{name}")
            self.average.restart(self._shards())
        for name, weight in self.trainable.items():
            _set_local_shard(weight, tensors, f"master/{name}")
            for key in MOMENTS:
                _set_local_shard(weight, tensors, f"{key}/{name}", key)
        steps = (float(tensors[key]) for key in tensors.shapes if key.startswith("step/"))
        self._set_steps(max(steps, default=0.0))

    def copy_masters_to_weights(self) -> None:
        if zero_stage(self.accelerator) == 3:
            for weight in self.trainable.values():
                _copy_master_to_weight(weight)
        else:
            self.module.optimizer.update_lp_params()

    def model_state(self) -> dict[str, Tensor]:
        if zero_stage(self.accelerator) == 3:
            return self.accelerator.get_state_dict(self.module) or {}  # unsharded on the main process, nothing elsewhere
        return dict(self.module.module.state_dict())


def count_up(optimizer: DeepSpeedCPUAdam, count: int) -> None:
    """Set the powers of beta that the offloaded Adam keeps to their values after `count` steps.

    Adam multiplies them in float32 step by step. After a jump it computes the power, which may differ in the last bit
    (IncrementStep of DeepSpeed's csrc/includes/cpu_adam.h). This function therefore steps on a single number at rate 0.
    """
    group, none = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    for step in range(1, count + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"], *none
        )


def _local_shard(weight: Tensor, moment: str | None = None) -> FlatTensorSlice | None:
    """Return this process's part of a weight's float32 master, or of one of its moments, or None if it has none."""
    state: Any = weight
    if is_sharded(weight):
        values = safe_get_local_fp32_param(weight) if moment is None else safe_get_local_optimizer_state(weight, moment)
        start = values.numel() * state.ds_zero_partition_rank
        values = values[: max(0, full_numel(weight) - start)]  # what follows is padding
    elif state._hp_mapping is None:
        return None
    else:
        values, start = state._hp_mapping.get_hp_fragment(moment), state._hp_mapping.lp_fragment_address.start
    return FlatTensorSlice(values, start, tuple(full_shape(weight))) if values.numel() else None


def _set_local_shard(weight: Tensor, tensors: StoredState, name: str, moment: str | None = None) -> None:
    """Load this process's part of a master or of a moment. A moment that is not stored is 0."""
    part = _local_shard(weight, moment)
    if part is None:
        return
    if moment and name not in tensors.shapes:  # a checkpoint from before the first step has none
        values = torch.zeros_like(part.values)
    else:
        values = tensors.part(name, part.start, part.values.numel())
    state: Any = weight
    if not is_sharded(weight):
        part.values.data.copy_(values)
        return
    padded = torch.zeros(state.ds_tensor.numel(), device=part.values.device)
    padded[: len(values)] = values
    if moment is None:
        safe_set_local_fp32_param(weight, padded)
    else:
        safe_set_local_optimizer_state(weight, padded, moment)


def _copy_master_to_weight(weight: Tensor) -> None:
    """Under ZeRO-3, round this process's part of the master to its part of the weight."""
    state: Any = weight
    if state.ds_status is ZeroParamStatus.AVAILABLE:  # a small one that stays gathered
        state.partition()
    state.ds_tensor.data.copy_(safe_get_local_fp32_param(weight))
