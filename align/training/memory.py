"""The memory of a run: arithmetic before it starts, and the peak of its largest micro-batch before its first update.

The memory of weights, gradients and optimizer state follows from shapes. That of activations is measured:
`align.training.peak_memory` runs the largest micro-batch first and drops its gradients.
"""

import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from align.core.errors import UserError
from align.core.settings import ModelConfig, OptimizationConfig
from align.model_registry.registry import resolve_model
from align.models.backbone import Backbone, cache_elements_per_token, model_class
from align.models.folders import base_of, load_config
from align.models.quantization import quantize_on_meta
from align.runtime.distributed import compute_dtype, run_on_all
from align.runtime.process import cgroup_bytes_left, process_peak, release_freed_memory, reset_process_peak
from align.runtime.sharding import full_nbytes, full_numel, full_shape

GIB = 2**30
FLOAT32_BYTES = 4
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
"""bitsandbytes: smaller weights have moments in float32; numbers that share a scale."""
ALWAYS_FITS_BYTES = 2**26
"""Models with smaller weights (in bytes) are assumed to fit: nothing is estimated or measured."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Batch-independent memory of a process in bytes: weights, masters and optimizer state by name, and gradients."""

    resident: dict[str, int]
    gradients: int

    @property
    def total(self) -> int:
        return sum(self.resident.values()) + self.gradients

    def table(self, free: int) -> str:
        """Return one line for display."""
        parts = self.resident | {"gradients": self.gradients}
        sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        return f"memory, GiB per process: {self.total / GIB:.2f} before activations ({sizes}), {free / GIB:.2f} free"


class Sharding(NamedTuple):
    """DeepSpeed's sharding: ZeRO stage (0 for none), processes, and whether the optimizer is offloaded to the host."""

    stage: int = 0
    processes: int = 1
    offload: bool = False

    @classmethod
    def from_accelerator(cls, accelerator: Accelerator) -> "Sharding":
        plugin = accelerator.state.deepspeed_plugin
        if plugin is None:
            return cls()
        zero = plugin.deepspeed_config.get("zero_optimization", {})
        offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        return cls(plugin.zero_stage, accelerator.num_processes, offload and accelerator.device.type != "cpu")


def resident_memory(optimizer: str, trained: Sequence[Tensor], weights: int, sharding: Sharding) -> MemoryEstimate:
    """Estimate the memory that a run holds independently of its batches. `trained` weights may be on the meta device.

    `weights` is the size of all weights in bytes, including frozen weights and other models.
    """
    count = sum(map(full_numel, trained))
    masters = sum(FLOAT32_BYTES * full_numel(weight) for weight in trained if weight.dtype != torch.float32)
    state = sum(optimizer_bytes(optimizer, full_shape(weight)) for weight in trained)
    stage, processes, offload = sharding
    if stage:
        masters, state = (0, 0) if offload else (masters // processes, state // processes)
    resident = {"weights": weights // processes if stage == 3 else weights, "masters": masters, "optimizer": state}
    return MemoryEstimate(resident, FLOAT32_BYTES * count // (processes if stage >= 2 else 1))


def optimizer_bytes(optimizer: str, shape: Sequence[int]) -> int:
    """Return the size of an optimizer's state for a weight of this shape, in bytes."""
    count = math.prod(shape)
    if optimizer == "adafactor":  # a row and a column for each matrix, full size for a vector
        return FLOAT32_BYTES * (sum(shape[-2:]) if len(shape) > 1 else sum(shape))
    moments = 1 if optimizer == "lion_8bit" else 2
    if optimizer.endswith("8bit") and count >= SMALLEST_8BIT:
        scales = -(-count // BLOCK_8BIT)
        return moments * (count + FLOAT32_BYTES * scales)
    return moments * FLOAT32_BYTES * count


def weights_bytes(modules: Sequence[nn.Module]) -> int:
    """Return the size of all weights of modules in bytes. Shared weights count once."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    return sum(map(full_nbytes, weights.values()))


def cache_bytes(backbone: Backbone, tokens: int, rows: int) -> int:
    """Return the memory for sampling in bytes: key-value cache of `tokens` tokens, and logits of `rows` rows for drawing."""
    size = backbone.model.dtype.itemsize
    per_entry = size + 3 * FLOAT32_BYTES + 8  # logits; in float32, minus their largest, their exponentials; a float64 sum
    vocabulary = int(backbone.model.config.vocab_size)
    return cache_elements_per_token(backbone) * size * tokens + per_entry * vocabulary * rows


class Memory:
    """Memory on a run's device, as seen by this process: free, required and peak memory.

    On a CPU this is the resident memory of the process; on a GPU what torch has allocated.

    Attributes:
        resident_bytes: weights, masters and optimizer state, once `check` has counted them.
    """

    def __init__(self, accelerator: Accelerator, model: ModelConfig, optimization: OptimizationConfig) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.model, self.lora_r, self.dtype = model.model, model.lora_r, model.dtype
        self.quantization = model.quantization
        self.optimizer, self.batch_tokens = optimization.optimizer, optimization.micro_batch_tokens
        self.recomputes = model.gradient_checkpointing
        self.sharding = Sharding.from_accelerator(accelerator)
        gc.collect()  # memory of an earlier run in this process
        release_freed_memory()
        self.start_bytes = self.expected_bytes = self.resident_bytes = self.earlier_peak = 0
        self.estimate: MemoryEstimate | None = None
        if self.device.type == "cpu":
            self.start_bytes = psutil.Process().memory_info().rss
        self._reset_peak()

    def free(self) -> int:
        """Return the memory that this process could use in total, in bytes, including its current use."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        held, local_processes = psutil.Process().memory_info().rss, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(held) + min(int(psutil.virtual_memory().available), cgroup_bytes_left()) // local_processes

    def left(self) -> int:
        """Return the memory that this process could use in addition to its current use, in bytes."""
        cuda = self.device.type == "cuda"
        held = torch.cuda.memory_allocated(self.device) if cuda else int(psutil.Process().memory_info().rss)
        return max(0, self.free() - held)

    def peak(self) -> int:
        """Return the peak memory since the start of the run, in bytes."""
        return max(self.earlier_peak, self._current_peak())

    def _current_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else process_peak()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_process_peak()

    def check_before_load(self, copies: int = 0) -> None:
        """Raise a UserError before a model is loaded if it, its gradients, its optimizer's state and its copies do not fit.

        `copies` is the number of frozen copies, kept if all weights are trained.
        """
        source = load_config(base_of(str(resolve_model(self.model)))[0])
        try:
            with torch.device("meta"):
                model = model_class(source).from_config(source, dtype=compute_dtype(self.dtype))
            if self.quantization:
                quantize_on_meta(model, self.quantization, compute_dtype(self.dtype))
        except UserError:
            raise
        except Exception:  # loading will reject this architecture or config with the reason
            return
        weights = weights_bytes([model])
        trained = [] if self.lora_r else list(model.parameters())
        self._require(self._estimate(trained, weights * (1 if self.lora_r else 1 + copies)))

    def check(self, module: nn.Module, frozen: Sequence[nn.Module] = (), more: Mapping[str, int] | None = None) -> str:
        """Count the bytes of a run with loaded models and `more` by name; return a line, "" for a model that fits anywhere.

        Called before the optimizer is made. Raise a UserError if they do not fit.
        """
        weights = weights_bytes([module, *frozen])
        if weights < ALWAYS_FITS_BYTES:
            return ""
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        estimate = self._estimate(trained, weights)
        self.estimate = estimate = replace(estimate, resident=estimate.resident | dict(more or {}))
        self.resident_bytes = sum(estimate.resident.values())
        run_on_all(lambda: self._require(estimate), self.accelerator)  # free memory differs by process
        return estimate.table(self.free())

    @contextmanager
    def measuring(self, size: str, has_optimizer_state: bool) -> Iterator[None]:
        """Measure the peak of the largest micro-batch, described by `size`. Its forward and backward pass run inside.

        The optimizer's state is added unless it is in memory already. Raise a UserError on all processes if one lacks
        memory.
        """
        assert self.estimate is not None
        to_come = 0 if has_optimizer_state else self.estimate.resident["optimizer"]
        self.earlier_peak = self.peak()
        self._reset_peak()
        error: Exception | None = None
        try:
            yield
        except torch.OutOfMemoryError as full:
            error = self._does_not_fit(size, "more memory than there is")
            error.__cause__ = full
        except Exception as other:
            error = other

        def conclude() -> None:
            if error:
                raise error
            self.expected_bytes = self._current_peak() + to_come
            if self.expected_bytes > self.free():
                raise self._does_not_fit(size, f"{self.expected_bytes / GIB:.1f} GiB per process")

        run_on_all(conclude, self.accelerator)

    def _does_not_fit(self, size: str, needed: str) -> UserError:
        advice = f"lower micro_batch_tokens to {max(1, self.batch_tokens // 2)}, which changes no result"
        if not self.recomputes:
            advice += ", or set gradient_checkpointing true"
        return UserError(
            f"model '{self.model}': the largest micro-batch ({size}) takes {needed}, but {self.free() / GIB:.1f} GiB are "
            f"free on {self.device}: {advice}"
        )

    def release_excess_memory(self) -> None:
        """On a CPU, return freed memory to the system once the process holds more than the measured peak.

        The C library keeps freed memory for later buffers. Rows of varying lengths leave gaps that fit none of them.
        """
        if self.device.type == "cpu" and 0 < self.expected_bytes < psutil.Process().memory_info().rss:
            release_freed_memory()

    def _estimate(self, trained: Sequence[Tensor], weights: int) -> MemoryEstimate:
        estimate = resident_memory(self.optimizer, trained, weights, self.sharding)
        return replace(estimate, resident=estimate.resident | {"process": self.start_bytes})

    def _require(self, estimate: MemoryEstimate) -> None:
        free = self.free()
        if estimate.total > free:
            advice = [] if self.lora_r else ["set lora_r 16"]
            if self.lora_r and not self.quantization:
                advice.append("set load_in_4bit true")
            if not (self.lora_r or self.optimizer != "adamw" or self.accelerator.state.deepspeed_plugin):
                advice.append("set optimizer adafactor or adamw_8bit")  # DeepSpeed supports only AdamW
            at_stage_3 = self.sharding.stage == 3
            advice.append("shard it over more processes" if at_stage_3 else "shard it by ZeRO-3 (docs/clusters.md)")
            raise UserError(
                f"model '{self.model}': training needs about {estimate.total / GIB:.1f} GiB per process before "
                f"activations, but {free / GIB:.1f} GiB are free on {self.device}; {', or '.join(advice)}"
            )
