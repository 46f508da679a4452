"""Estimates how much memory a run will need, before it starts, and refuses a run that the machine has no memory for.

Resident memory follows from shapes: weights, float32 masters, optimizer state, gradients. Temporary memory is counted by
`align.training.memory_dry_run` on the run's largest micro-batch.
"""

import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from align.builtin.zoo import resolve_model
from align.core.errors import UserError
from align.core.settings import ModelConfig, RunConfig
from align.models.backbone import Backbone, cache_elements_per_token, model_class
from align.models.configs import base_of, load_config
from align.runtime.distributed import compute_dtype, cpu_flags, run_on_all
from align.runtime.process import cgroup_bytes_left, process_peak, release_freed_memory, reset_process_peak
from align.runtime.sharding import whole_bytes, whole_count, whole_shape

GIB = 2**30
FLOAT32_BYTES = 4
"""Bytes of a float32."""
HEAP_OVERHEAD = 0.2
"""What fragmentation of the C library's heap adds to temporary memory, as a share of it. None on a GPU, where torch counts
live tensors."""
PROCESS_OVERHEAD = int(0.45 * GIB)
"""Bytes of a process on a CPU that the estimate does not count: kernels compiled at their first use, threads, texts. Both
overheads were fitted to four runs of SmolLM2-135M on Linux (docs/metrics.md)."""
AMX_KERNELS = int(1.8 * GIB)
"""Bytes of oneDNN's kernels for bfloat16 on a CPU with AMX. oneDNN keeps the kernels of the last 1024 products of matrices
that differ in a shape (ONEDNN_PRIMITIVE_CACHE_CAPACITY), and a run has more of these than that. Inferred from one
observation: supervised training of SmolLM2-135M on such a CPU was estimated at 3.9 GiB and used 5.7. On a CPU with
avx512_bf16 alone, 1024 kernels took 0.55 GiB whatever the shapes; only a run with few shapes stays in PROCESS_OVERHEAD."""
ALWAYS_FITS_BYTES = 2**26
"""Below this many bytes of weights a model fits anywhere: nothing is estimated."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process will hold on its device.

    Attributes:
        resident: bytes held all the time, by name: weights, masters, optimizer, process.
        gradients: all float32 gradients.
        phases: the peak of temporary memory in each phase, by name.
        accumulates_gradients: whether gradients of earlier micro-batches are held while a later one is learned from.
        heap_overhead: what the allocator adds to temporary memory, as a share of it.
    """

    resident: dict[str, int]
    gradients: int
    phases: dict[str, int] = field(default_factory=dict)
    accumulates_gradients: bool = True
    heap_overhead: float = 0.0

    @property
    def total(self) -> int:
        """The peak."""
        learn = self.phases.get("learning", 0)
        # The last gradients are made when the last activations have been freed.
        learn = learn + self.gradients if self.accumulates_gradients else max(learn, self.gradients)
        return sum(self.resident.values()) + int((1 + self.heap_overhead) * max([learn, *self.phases.values()]))

    def table(self, free: int) -> str:
        """A short table for people; `free`: bytes that this process can have on its device."""

        def sizes(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)

        return (
            f"memory estimate, GiB per process: {self.total / GIB:.2f} at the peak, {free / GIB:.2f} free\n"
            f"  all the time   {sizes(self.resident)}\n"
            f"  temporarily    {sizes({'gradients': self.gradients} | self.phases)}"
            + (f"; heap overhead {self.heap_overhead:.0%}" if self.heap_overhead else "")
        )


class Sharding(NamedTuple):
    """DeepSpeed's sharding: its ZeRO stage (0: none), the processes, and whether the optimizer is offloaded to the host."""

    stage: int = 0
    processes: int = 1
    offload: bool = False

    @classmethod
    def from_accelerator(cls, accelerator: Accelerator) -> "Sharding":
        """The sharding that the launcher has set up."""
        plugin = accelerator.state.deepspeed_plugin
        if plugin is None:
            return cls()
        zero = plugin.deepspeed_config.get("zero_optimization", {})
        offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        return cls(plugin.zero_stage, accelerator.num_processes, offload and accelerator.device.type != "cpu")


def resident_memory(optimizer: str, trained: Sequence[Tensor], weights: int, sharding: Sharding) -> MemoryEstimate:
    """The memory that a run holds independently of its batches.

    Args:
        optimizer: `adamw` or `adafactor`.
        trained: the weights that are trained, on any device (meta too).
        weights: bytes of all weights, frozen ones and those of other models included.
        sharding: how DeepSpeed shards them.
    """
    count = sum(map(whole_count, trained))
    masters = sum(FLOAT32_BYTES * whole_count(weight) for weight in trained if weight.dtype != torch.float32)
    state = 2 * FLOAT32_BYTES * count  # AdamW: two moments
    if optimizer == "adafactor":  # a row and a column for each matrix, a vector whole
        state = sum(
            FLOAT32_BYTES * (sum(shape[-2:]) if len(shape) > 1 else sum(shape)) for shape in map(whole_shape, trained)
        )
    stage, processes, offload = sharding
    if stage:
        masters, state = (0, 0) if offload else (masters // processes, state // processes)
    resident = {"weights": weights // processes if stage == 3 else weights, "masters": masters, "optimizer": state}
    return MemoryEstimate(resident, FLOAT32_BYTES * count // (processes if stage >= 2 else 1))


def weights_bytes(modules: Sequence[nn.Module]) -> int:
    """Bytes of all weights of some modules; shared weights count once."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    return sum(map(whole_bytes, weights.values()))


def cache_bytes(backbone: Backbone, tokens: int, rows: int) -> int:
    """Bytes of sampling: keys and values of `tokens` tokens, and the logits of `rows` rows with what drawing needs."""
    size = backbone.model.dtype.itemsize
    per_entry = size + 3 * FLOAT32_BYTES + 8  # logits; in float32, minus their largest, their exponentials; a float64 sum
    vocabulary = int(backbone.model.config.vocab_size)
    return cache_elements_per_token(backbone) * size * tokens + per_entry * vocabulary * rows


class Memory:
    """Memory on one run's device, as this process sees it: what is free, what will be needed, what was needed.

    On a CPU this is the resident memory of the process; on a GPU what torch has allocated.
    """

    def __init__(self, accelerator: Accelerator, limit: float) -> None:
        self.accelerator, self.device, self.limit = accelerator, accelerator.device, limit
        self.sharding = Sharding.from_accelerator(accelerator)
        gc.collect()  # what an earlier run in this process left
        release_freed_memory()
        self.start_bytes = self.expected_bytes = self.resident_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.start_bytes = psutil.Process().memory_info().rss
            reset_process_peak()

    def free(self) -> int:
        """Bytes that this process could hold in total, including what it holds already; `memory_limit` where that is set."""
        if self.limit:
            return int(self.limit * GIB)
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        held, local_processes = psutil.Process().memory_info().rss, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(held) + min(int(psutil.virtual_memory().available), cgroup_bytes_left()) // local_processes

    def left(self) -> int:
        """Bytes that this process could hold in addition to what it holds now."""
        cuda = self.device.type == "cuda"
        held = torch.cuda.memory_allocated(self.device) if cuda else int(psutil.Process().memory_info().rss)
        return max(0, self.free() - held)

    def peak(self) -> int:
        """The most bytes that were held since the run began."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return process_peak()

    def check_before_load(self, config: ModelConfig, copies: int = 0) -> None:
        """Refuse a model before it is loaded if its weights, gradients and optimizer state alone are too much.

        Args:
            config: a stage's settings.
            copies: frozen copies of the model that are kept in addition to it where all its weights are trained.

        Raises:
            UserError: if they do not fit.
        """
        source = load_config(base_of(str(resolve_model(config.model)))[0])
        try:
            with torch.device("meta"):
                model = model_class(source).from_config(source, dtype=compute_dtype(config.dtype))
        except Exception:  # loading will refuse this architecture or config, and say why
            return
        weights = weights_bytes([model])
        trained = [] if config.lora_rank else list(model.parameters())
        self._require(self._estimate(config, trained, weights * (1 if config.lora_rank else 1 + copies)), config)

    def check(
        self,
        config: ModelConfig,
        module: nn.Module,
        frozen: Sequence[nn.Module],
        phases: Mapping[str, Callable[[], int]],
        accumulates_gradients: bool,
        more: Mapping[str, int] | None = None,
        in_checkpoints: int = 0,
    ) -> str:
        """Estimate for a run whose models are loaded and whose optimizer is not made yet.

        Args:
            module: what is trained.
            frozen: other models that are kept.
            phases: functions that count the peak of each phase in bytes; `learning` is one of them.
            accumulates_gradients: see `MemoryEstimate`.
            more: other bytes that are held all the time, by name.
            in_checkpoints: bytes of a checkpoint in addition to masters and the optimizer's state.

        Returns:
            The estimate as a table; "" for a model that fits anywhere.

        Raises:
            UserError: if the device has less memory.
        """
        weights = weights_bytes([module, *frozen])
        if weights < ALWAYS_FITS_BYTES:
            return ""
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        estimate = self._estimate(config, trained, weights)
        resident = estimate.resident | dict(more or {})
        if "checkpoint" in resident:
            resident["checkpoint"] += in_checkpoints
        self.resident_bytes = sum(resident.values())
        peaks = {name: count() for name, count in phases.items()}
        estimate = replace(estimate, resident=resident, phases=peaks, accumulates_gradients=accumulates_gradients)
        run_on_all(lambda: self._require(estimate, config), self.accelerator)  # what is free differs by process
        self.expected_bytes = estimate.total
        return estimate.table(self.free())

    def hold_to_estimate(self) -> None:
        """On a CPU, give freed memory back where it has grown beyond the estimate.

        Freed memory is kept for the next buffers. With rows of ever new lengths, gaps that fit none
        of them add up, update by update: without this, the fine-tuning of the demo held 5.6 GiB where 4.0 were estimated.
        """
        if self.device.type == "cpu" and 0 < self.expected_bytes < psutil.Process().memory_info().rss:
            release_freed_memory()

    def _estimate(self, config: ModelConfig, trained: Sequence[Tensor], weights: int) -> MemoryEstimate:
        assert isinstance(config, RunConfig)
        estimate = resident_memory(config.optimizer, trained, weights, self.sharding)
        heap, process = (0.0, 0) if self.device.type == "cuda" else (HEAP_OVERHEAD, PROCESS_OVERHEAD)
        resident = estimate.resident | {"process": self.start_bytes + process}
        if self.device.type == "cpu" and config.checkpoint_in_background:
            masters = sum(FLOAT32_BYTES * whole_count(weight) for weight in trained)
            shares = self.sharding.processes if self.sharding.stage else 1
            resident["checkpoint"] = masters // shares + resident["optimizer"]
        if self.device.type == "cpu" and compute_dtype(config.dtype) == torch.bfloat16 and "amx_bf16" in cpu_flags():
            resident["AMX kernels"] = AMX_KERNELS
        return replace(estimate, resident=resident, heap_overhead=heap)

    def _require(self, estimate: MemoryEstimate, config: ModelConfig) -> None:
        free = self.free()
        if estimate.total > free:
            raise UserError(
                f"model '{config.model}': training needs about {estimate.total / GIB:.1f} GiB per process, but "
                f"{free / GIB:.1f} GiB are free on {self.device}; to reduce it, the largest saving first: "
                f"{'; '.join(suggestions(estimate, config, self.sharding))}; memory_limit {math.ceil(estimate.total / GIB)} "
                "starts it anyway"
            )


def suggestions(estimate: MemoryEstimate, config: ModelConfig, sharding: Sharding) -> list[str]:
    """Settings that save memory, each with the GiB that it saves about, the largest saving first."""
    assert isinstance(config, RunConfig)
    resident, learning = estimate.resident, estimate.phases.get("learning", 0)
    state = resident["masters"] + resident["optimizer"] + estimate.gradients
    savings = []
    if not config.lora_rank:
        savings += [(state, "lora_rank 16"), (resident["optimizer"], "optimizer adafactor")]
    if not config.gradient_checkpointing:
        # Measured on SmolLM2-135M with a ranking and a rollout: two thirds of the temporary memory of learning.
        savings.append((2 * learning // 3, "gradient_checkpointing true"))
    savings.append((learning // 2, f"micro_batch_tokens {max(1, config.micro_batch_tokens // 2)}"))
    if sharding.stage < 3:
        savings.append(((state + resident["weights"]) // 2, "ZeRO-3 on two processes (docs/clusters.md)"))
    else:
        savings.append(((state + resident["weights"]) // 2, "twice the processes"))
    largest = sorted(((size, text) for size, text in savings if size > 0.01 * estimate.total), reverse=True)
    return [f"{text} (about {size / GIB:.1f} GiB)" for size, text in largest] or ["a smaller model"]
