"""The optimizer over groups of weights, learning rates, float32 masters, gradient all-reduce, and EMA of weights."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from transformers.optimization import Adafactor

from align.core.settings import OptimizationConfig, Schedule
from align.models.quantization import load_bitsandbytes
from align.runtime.sharding import full_shape

BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "lion_8bit": "Lion8bit",
}
"""Optimizers of bitsandbytes (8-bit states: arXiv 2110.02861). Paged ones move states to the host when a GPU is full."""
BUCKET_BYTES = 25 * 2**20
"""Size of a gradient bucket: 25 MiB, as in DistributedDataParallel. A bucket is in memory twice while it is summed."""


@dataclass(frozen=True)
class ParamGroup:
    """Weights that share a learning rate."""

    name: str
    """The rate is logged as `learning_rate/<name>`, or as `learning_rate` if empty."""
    weights: frozenset[str]
    """Their names in the trained module."""
    peak: float
    frozen_steps: int = 0
    """Number of first steps in which the weights do not change. Their schedule begins afterward."""

    @property
    def metric(self) -> str:
        """The metric of its rate."""
        return f"learning_rate/{self.name}" if self.name else "learning_rate"

    def rate(self, config: OptimizationConfig, step: int, total: int) -> float:
        """Return the learning rate of a step from 1 to `total`: 0 in `frozen_steps`, while moments follow the gradients."""
        if step <= self.frozen_steps:
            return 0.0
        return learning_rate(config, step - self.frozen_steps, total - self.frozen_steps, self.peak)


@dataclass(frozen=True)
class ScheduledGroup(ParamGroup):
    """A group of an optimizer that the caller built. A scheduler, or the caller, sets its learning rate."""

    optimizer_group: Mapping[str, Any] | None = None

    def rate(self, config: OptimizationConfig, step: int, total: int) -> float:
        """Return the current learning rate of the optimizer's group."""
        assert self.optimizer_group is not None
        return float(self.optimizer_group["lr"])


def scheduled_groups(optimizer: torch.optim.Optimizer) -> list[ParamGroup]:
    """Return a `ScheduledGroup` for each group of an optimizer, and store the metric name in the group."""
    groups: list[ParamGroup] = []
    for number, group in enumerate(optimizer.param_groups):
        scheduled = ScheduledGroup(str(number or ""), frozenset(), group["lr"], optimizer_group=group)
        group["metric"] = scheduled.metric
        groups.append(scheduled)
    return groups


def learning_rate(config: OptimizationConfig, update: int, total: int, peak: float) -> float:
    """Return the learning rate of an update from 1 to `total`: a linear rise during warm-up, then the schedule's decay.

    `inverse_sqrt` is as in the Transformer (Vaswani et al. 2017, section 5.3) and in transformers. `truncated_rsqrt` is
    T5's, 1/sqrt(max(n, k)) for update n and warm-up k (Raffel et al. 2020, section 3.1.2), scaled to `peak`: it is constant
    during warm-up. The name is from T5's code (Mesh TensorFlow).
    """
    warmup = math.ceil(round(config.warmup_ratio * total, 6))  # 0.07 * 100 is slightly more than 7
    if config.lr_scheduler_type == "truncated_rsqrt":
        return peak * math.sqrt(max(1, warmup) / max(1, warmup, update))
    if update <= warmup:
        return peak * update / warmup
    done = (update - 1 - warmup) / max(1, total - warmup)
    decay: dict[Schedule, float] = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "inverse_sqrt": math.sqrt(max(1, warmup) / max(1, update)),
    }
    return peak * decay[config.lr_scheduler_type]


def complete_groups(peak: float, weights: Iterable[str], groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """Return the groups, preceded by one with the learning rate `peak` for all weights that they do not name."""
    named = frozenset().union(*(group.weights for group in groups))
    others = ParamGroup("", frozenset(weights) - named, peak)
    return [group for group in (others, *groups) if group.weights]


def build_optimizer(
    config: OptimizationConfig, weights: Mapping[str, Tensor], groups: Sequence[ParamGroup]
) -> torch.optim.Optimizer:
    """Return the run's optimizer. Weight decay applies only to matrices. Its groups have the `metric` of `groups`."""
    parts: dict[tuple[str, bool], dict[str, Any]] = {}
    for group in groups:
        for name, weight in weights.items():
            if name in group.weights:
                is_matrix = len(full_shape(weight)) >= 2
                decay = config.weight_decay if is_matrix else 0.0
                part = {"params": [], "weight_decay": decay, "metric": group.metric}
                parts.setdefault((group.metric, not is_matrix), part)["params"].append(weight)
    ordered = [parts[key] for key in sorted(parts)]
    if config.optimizer == "adafactor":
        return Adafactor(ordered, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    if config.optimizer != "adamw":
        optimizer = getattr(load_bitsandbytes().optim, BITSANDBYTES[config.optimizer])
        decays = {} if config.optimizer == "lion_8bit" else _adam_settings(config)  # Lion's defaults: 0.9 and 0.99
        return cast(torch.optim.Optimizer, optimizer(ordered, lr=config.learning_rate, **decays))
    return torch.optim.AdamW(ordered, lr=config.learning_rate, **_adam_settings(config), fused=True)


def _adam_settings(config: OptimizationConfig) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def make_master(weight: nn.Parameter) -> Tensor:
    """Return the float32 tensor that the optimizer updates: the weight itself, or a copy."""
    return weight if weight.dtype == torch.float32 else weight.detach().float().clone()


@contextmanager
def gradients_to_masters(weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> Iterator[None]:
    """Add each gradient that a backward pass completes in this context to its float32 master, by name, and drop it."""

    def move(master: Tensor, weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad.add_(weight.grad)  # widened inside the sum: no copy in float32
        weight.grad = None

    copied = [(weight, masters[name]) for name, weight in weights.items() if masters[name] is not weight]
    # Remove the hooks after the pass: a weight with a hook could not be used after the run.
    hooks = [weight.register_post_accumulate_grad_hook(partial(move, master)) for weight, master in copied]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
        """Set aside the complete gradients of the update's earlier losses."""
        self._earlier = [master.grad for master in self.masters]
        for master in self.masters:
            master.grad = None

    def finish(self) -> None:
        """Give each master the sum of its gradients over passes and processes.

        A weight that has no gradient on any process has none afterward, as on one process. The engine's step uses 0 for it.
        """
        present = torch.tensor([float(master.grad is not None) for master in self.masters], device=self.masters[0].device)
        torch.distributed.all_reduce(present)
        is_present = (present > 0).tolist()
        for bucket in self.buckets:
            masters = [self.masters[number] for number in bucket]
            flat = _flatten_dense_tensors([torch.zeros_like(one) if one.grad is None else one.grad for one in masters])
            for master in masters:  # its gradient is in `flat` now
                master.grad = None
            torch.distributed.all_reduce(flat)
            for number, master, total in zip(bucket, masters, _unflatten_dense_tensors(flat, masters), strict=True):
                earlier = self._earlier[number]
                master.grad = (total if earlier is None else earlier.add_(total)) if is_present[number] else earlier
        self._earlier = []


class WeightAverage:
    """Exponential moving average (EMA) of float32 weights over optimizer steps.

    It is initialized with the weights. InstructGPT uses decay 0.992 (appendix C.4).
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.values = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Update the average with the weights after a step."""
        for name, value in self.values.items():
            value.lerp_(weights[name], 1.0 - self.decay)

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Reset the average to `weights`."""
        copy_weights(weights, self.values)

    @contextmanager
    def in_place_of(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace `weights` with the average in this context."""
        held = {name: weight.detach().clone() for name, weight in weights.items()}
        copy_weights(self.values, weights)
        try:
            yield
        finally:
            copy_weights(held, weights)


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy tensors in place, by name. The target may have another dtype."""
    for name, weight in target.items():
        weight.copy_(source[name])
