"""What the three stages share: the optimiser over float32 masters, schedules, checkpoints, resume.

A stage hands over its loss as sums that are already divided by global counts, so that padding, micro-batches and the
number of processes never change a gradient; here they are only added up.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from transformers.optimization import Adafactor

from align.batching import MicroBatch
from align.config import RunConfig, Schedule
from align.distributed import all_sum
from align.errors import UserError
from align.files import new_folder, read_json, write_json
from align.run import Run

Sums = dict[str, Tensor]
"""Metrics as scalar tensors that add up over micro-batches and processes."""


def learning_rate(config: RunConfig, update: int, total: int) -> float:
    """The rate of update 1..total: a linear rise over the warm-up share, then the schedule's decay.

    Inverse square root as in T5 (section 3.1.2, 1/sqrt(max(n, k)) with k the warm-up), scaled to peak at `learning_rate`.
    """
    warmup = math.ceil(round(config.warmup * total, 6))  # 0.07 * 100 is a little more than 7
    if update <= warmup:
        return config.learning_rate * update / warmup
    done = (update - 1 - warmup) / max(1, total - warmup)
    decay: dict[Schedule, float] = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "inverse_sqrt": math.sqrt(max(1, warmup) / max(1, update)),
    }
    return config.learning_rate * decay[config.schedule]


class NotFiniteError(UserError):
    """A loss or a gradient became NaN or infinite; the weights are those of before the update."""


class Optimisation:
    """The trainable weights of one module under one optimiser.

    Weights that compute in bfloat16 have float32 masters: a gradient is added to its master as soon as it is whole and
    then dropped, and small updates are not rounded away. Processes add their gradients up once an update.

    Args:
        run: settings, processes and the folder.
        module: everything that is trained; what does not require a gradient stays as it is.
        total: number of updates, for the schedule.
    """

    def __init__(self, run: Run, module: nn.Module, total: int) -> None:
        self.run, self.total = run, total
        self.accelerator = run.accelerator
        self.module = module.to(run.accelerator.device)
        self.named = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.masters = {name: _master(weight) for name, weight in self.named.items()}
        self.optimizer = build_optimizer(run.config, self.masters.values())

    def accumulate(
        self, batches: Iterable[MicroBatch], loss: Callable[[list[int]], tuple[Tensor, Sums]], more: bool = False
    ) -> Sums:
        """Add up gradients over micro-batches, and metrics over micro-batches and processes.

        Args:
            loss: gives a micro-batch's share of the global loss and its metrics as sums.
            more: another call follows before the step.

        Raises:
            NotFiniteError: if the loss is not a number on any process; nothing was updated.
        """
        totals: Sums = {}
        plan = list(batches)
        for number, batch in enumerate(plan):
            value, sums = loss(batch.rows)
            self._backward(value * batch.weight, not more and number + 1 == len(plan))
            for name, amount in {"loss": value, **sums}.items():
                added = amount.detach().double() * batch.weight
                totals[name] = totals[name] + added if name in totals else added
        names = sorted(totals)
        summed = all_sum(torch.stack([totals[name].reshape(()) for name in names]), self.accelerator)
        result = dict(zip(names, summed, strict=True))
        if not torch.isfinite(result["loss"]):
            self._drop_gradients()
            raise NotFiniteError("the loss is not a finite number")
        return result

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, update: int) -> dict[str, float]:
        """Apply the gradients; gives `learning_rate` and `gradient_norm` (before clipping).

        Raises:
            NotFiniteError: if the gradient norm is not finite; nothing was updated.
        """
        rate = learning_rate(self.run.config, update, self.total)
        self._set_rate(rate)
        return {"learning_rate": rate, "gradient_norm": self._apply()}

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _apply(self) -> float:
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if self.accelerator.num_processes > 1:
            _sum_gradients(gradients)
        limit = self.run.config.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), limit))
        if not math.isfinite(norm):
            self._drop_gradients()
            raise NotFiniteError("the gradient is not a finite number")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, weight in self.named.items():
                if self.masters[name] is not weight:
                    weight.copy_(self.masters[name])
        return norm

    def _drop_gradients(self) -> None:
        """Forget what was accumulated: a NaN must not reach the next update of a caller who goes on."""
        for tensor in (*self.masters.values(), *self.named.values()):
            tensor.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Masters and optimiser state as tensors, and numbers, by name. Independent of the number of processes."""
        tensors = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        numbers: dict[str, float] = {}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = value
                elif value is not None:
                    numbers[f"{key}/{name}"] = value
        return tensors, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Take back what `state` gave.

        Raises:
            UserError: if the names do not fit this module: a checkpoint of another model or of other settings.
        """
        check_fit(tensors, self.masters)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master/{name}"])
                self.named[name].copy_(master)
        for stored in (tensors, numbers):
            for path, value in stored.items():
                key, name = path.split("/", 1)
                if key != "master":
                    kept = value.to(self.masters[name].device, copy=True) if isinstance(value, Tensor) else value
                    self.optimizer.state[self.masters[name]][key] = kept

    def model_state(self) -> dict[str, Tensor]:
        """All weights of the module, whole, for saving."""
        return dict(self.module.state_dict())


def check_fit(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse the state of another module.

    Args:
        weights: this module's, whole, by name.

    Raises:
        UserError: if the checkpoint's weights have other names or shapes.
    """
    stored = {name.removeprefix("master/"): value.shape for name, value in tensors.items() if name.startswith("master/")}
    ours = {name: value.shape for name, value in weights.items()}
    wrong = [name for name in sorted(stored.keys() | ours.keys()) if stored.get(name) != ours.get(name)]
    if wrong:
        raise UserError(f"the checkpoint belongs to another model or other settings ('{wrong[0]}' does not match)")


def _master(weight: nn.Parameter) -> Tensor:
    """The float32 tensor that the optimiser steps: the weight itself, or a copy that collects its gradients."""
    if weight.dtype == torch.float32:
        return weight
    master = weight.detach().float().clone()

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(collect)
    return master


def _sum_gradients(gradients: list[Tensor], bucket_elements: int = 25_000_000) -> None:
    """Add gradients up over all processes, in buckets of about 100 MB."""
    bucket: list[Tensor] = []
    for number, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(item.numel() for item in bucket) >= bucket_elements or number + 1 == len(gradients):
            flat = _flatten_dense_tensors(bucket)
            torch.distributed.all_reduce(flat)
            for item, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                item.copy_(summed)
            bucket = []


def build_optimizer(config: RunConfig, weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW or Adafactor over weights; weight decay on matrices only."""
    listed = list(weights)
    groups = [
        {"params": [w for w in listed if w.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in listed if w.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=True)


def make_optimisation(run: Run, module: nn.Module, total: int) -> Optimisation:
    """The optimisation of a run: plain, or DeepSpeed's where the launcher asked for it."""
    if run.accelerator.state.deepspeed_plugin is None:
        return Optimisation(run, module, total)
    from align.zero import DeepSpeedOptimisation

    return DeepSpeedOptimisation(run, module, total)


def save_checkpoint(run: Run, optimisation: Optimisation, update: int, progress: Mapping[str, Any]) -> None:
    """Write a checkpoint to resume from, whole or not at all; older ones go once it is on disk.

    Args:
        progress: what the stage must remember (the KL coefficient, the best evaluation); JSON values.
    """
    tensors, numbers = optimisation.state()
    if run.is_main:
        target = run.folder / "checkpoints" / f"update-{update:06d}"
        with new_folder(target) as folder:
            save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "state.safetensors")
            write_json(folder / "trainer.json", {"update": update, "numbers": numbers, "progress": dict(progress)})
        run.keep_only(target)
    run.accelerator.wait_for_everyone()


def load_checkpoint(run: Run, optimisation: Optimisation) -> tuple[int, dict[str, Any]]:
    """Restore the last good checkpoint; gives the update it was taken after (0: none) and the stage's progress."""
    if run.checkpoint is None:
        return 0, {}
    stored = read_json(run.checkpoint / "trainer.json")
    try:
        optimisation.load_state(load_file(run.checkpoint / "state.safetensors"), stored["numbers"])
        update, progress = stored["update"], stored["progress"]
    except UserError as error:
        raise UserError(f"{run.checkpoint}: {error}") from error
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"{run.checkpoint}: broken ({type(error).__name__}: {error}); remove it to start anew") from error
    run.say(f"resumed from {run.checkpoint}")
    return update, progress
