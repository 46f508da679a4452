"""The optimization of `align.training.optimization` on a DeepSpeed engine: ZeRO 1, 2 and 3, with or without offload.

Its state is read and written through DeepSpeed's access to unsharded float32 tensors, so all checkpoints have one format:
they resume on another number of processes, on another ZeRO stage or without DeepSpeed, and contain no pickle.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from align.errors import UserError
from align.runtime.distributed import zero_stage
from align.training.averaging import WeightAverage
from align.training.expert_load import ExpertLoad
from align.training.optimization import (
    AVERAGE,
    NotFiniteError,
    Optimization,
    build_optimizer,
    complete_groups,
    require_same_weights,
)
from align.training.run import Run
from align.training.schedule import RateGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedOptimization(Optimization):
    """Trainable weights under a DeepSpeed engine, which keeps the float32 masters and shards them.

    Raises:
        UserError: for Adafactor, whose factored state cannot be split into flat shards.
    """

    module: Any
    """The engine; DeepSpeed ships no types."""

    def __init__(
        self, run: Run, module: nn.Module, total: int, groups: Sequence[RateGroup] = (), average_decay: float = 0.0
    ) -> None:
        if run.config.optimizer != "adamw":
            raise UserError(f"optimizer {run.config.optimizer}: not possible under DeepSpeed; use adamw")
        self.run, self.total, self.accelerator = run, total, run.accelerator
        self.trainable = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.groups = complete_groups(run.config, self.trainable, groups)
        self.expert_load = ExpertLoad.from_module(module, run.config.router_loss_weight)
        optimizer = build_optimizer(run.config, self.trainable, self.groups)
        self.module, self.optimizer = run.accelerator.prepare(module, optimizer)
        self._make_states()
        self.average = WeightAverage(self._shards(), average_decay) if average_decay else None

    def _shards(self) -> dict[str, Tensor]:
        """This process's flat float32 masters under ZeRO 1 and 2: a mean of the weights is sharded as they are."""
        return {str(number): flat.data for number, flat in enumerate(self.module.optimizer.single_partition_of_fp32_groups)}

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
        # The engine averages gradients over processes, but losses are shares of a sum.
        self.module.backward(loss * self.accelerator.num_processes)

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.module.optimizer.param_groups
        return groups

    def _apply(self) -> float:
        self.module.step()
        norm = float(self.module.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise NotFiniteError("the gradient is not a finite number")
        if self.average:
            self.average.add(self._shards())
        return norm

    def _make_states(self) -> None:
        """Make the moments of every flat shard now, so that they can be read and written before the first step.

        ZeRO 1 and 2 make and link them at the first step, and only those of the first parameter group.
        """
        engine, inner = self.module.optimizer, self.module.optimizer.optimizer
        if hasattr(engine, "_lazy_init_hp_params_optimizer_state"):
            for flat in (flat for group in inner.param_groups for flat in group["params"]):
                step = torch.zeros((), device=flat.device) if isinstance(inner, torch.optim.AdamW) else 0
                inner.state[flat] = {"step": step} | {key: torch.zeros_like(flat) for key in MOMENTS}
            engine._hp_optimizer_states_linked = False
            engine._lazy_init_hp_params_optimizer_state()
        self._set_steps(0.0)  # ZeRO-3 made its buffers by a step with zero gradients, which must not count

    def _set_steps(self, count: float) -> None:
        for state in self.module.optimizer.optimizer.state.values():
            step = state["step"]
            state["step"] = torch.full_like(step, count) if isinstance(step, Tensor) else int(count)

    def _drop_gradients(self) -> None:
        self.module.zero_grad()

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        tensors: dict[str, Tensor] = {}
        steps = [float(state["step"]) for state in self.module.optimizer.optimizer.state.values()]
        for name, weight in self.trainable.items():
            state = {"master": safe_get_full_fp32_param(weight)}
            state |= {key: safe_get_full_optimizer_state(weight, key) for key in MOMENTS}
            if self.run.is_main:
                tensors |= {f"{key}/{name}": value.cpu() for key, value in state.items()}
                tensors[f"step/{name}"] = torch.tensor(max(steps, default=0.0))
        if self.average:
            with self.average.in_place_of(self._shards()):
                means = {name: safe_get_full_fp32_param(weight) for name, weight in self.trainable.items()}
            tensors |= {f"{AVERAGE}/{name}": value.cpu() for name, value in means.items()} if self.run.is_main else {}
        return tensors, {}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        shapes = {
            name: torch.empty(getattr(weight, "ds_shape", weight.shape), device="meta")
            for name, weight in self.trainable.items()
        }
        require_same_weights(tensors, shapes)
        if self.average:  # one that was not kept before starts from here
            for name, weight in self.trainable.items():
                mean = tensors.get(f"{AVERAGE}/{name}", tensors[f"master/{name}"])
                safe_set_full_fp32_param(weight, mean.to(self.accelerator.device))
            self.average.restart(self._shards())
        for name, weight in self.trainable.items():
            master = tensors[f"master/{name}"].to(self.accelerator.device)
            safe_set_full_fp32_param(weight, master)
            for key in MOMENTS:
                safe_set_full_optimizer_state(weight, tensors[f"{key}/{name}"].to(self.accelerator.device), key)
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.copy_(master)
        self._set_steps(max(float(value) for key, value in tensors.items() if key.startswith("step/")))

    def model_state(self) -> dict[str, Tensor]:
        if zero_stage(self.accelerator) == 3:
            return self.accelerator.get_state_dict(self.module) or {}  # unsharded on the main process, nothing elsewhere
        return dict(self.module.module.state_dict())
