"""How much memory a run will need, told before it starts, and a refusal where the machine cannot give it.

What stays is counted from shapes: weights, float32 masters, the optimiser's state, gradients. What comes and goes is counted
by `align.rehearsal` on the run's largest micro-batch.
"""

import gc
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from align.config import ModelConfig, RunConfig
from align.distributed import compute_dtype
from align.errors import UserError
from align.heap import give_back
from align.models.backbone import Backbone, model_class
from align.models.loading import base_of, load_config
from align.models.zoo import resolve_model

GIB = 2**30
FLOAT = 4
"""Bytes of a float32."""
HEAP = 0.2
"""What the C library's heap holds in pieces beside what is alive, as a share of what comes and goes. None on a GPU, where
torch counts what is alive."""
BESIDE = int(0.45 * GIB)
"""What a process on a CPU takes beside all that is counted: kernels that are compiled at their first use, threads, texts.
Both numbers were fitted to four runs of SmolLM2-135M on Linux (docs/metrics.md)."""
SMALL = 2**26
"""Bytes of weights below which a model fits anywhere: nothing is estimated."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that one process will hold on its device.

    Attributes:
        stays: what is there all the time, by name: weights, masters, optimiser, base.
        gradients: float32 gradients of everything that is trained, whole.
        phases: the most that each phase adds, by name.
        together: whether gradients of earlier micro-batches wait while a later one learns.
        heap: share of what comes and goes that the allocator holds beside it.
    """

    stays: dict[str, int]
    gradients: int
    phases: dict[str, int] = field(default_factory=dict)
    together: bool = True
    heap: float = 0.0

    @property
    def total(self) -> int:
        """The peak."""
        learn = self.phases.get("learning", 0)
        # The last gradients come when the last activations have gone.
        learn = learn + self.gradients if self.together else max(learn, self.gradients)
        return sum(self.stays.values()) + int((1 + self.heap) * max([learn, *self.phases.values()]))

    def table(self, free: int) -> str:
        """A short table for a person; `free`: bytes that the device can give this process."""

        def line(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)

        return (
            f"memory estimate, GiB a process: {self.total / GIB:.2f} at the peak, {free / GIB:.2f} free\n"
            f"  all the time   {line(self.stays)}\n"
            f"  for a while    {line({'gradients': self.gradients} | self.phases)}"
            + (f"; the heap adds {self.heap:.0%}" if self.heap else "")
        )


class Sharding(NamedTuple):
    """DeepSpeed's part: its ZeRO stage (0: none), the processes, and whether the optimiser lives on the host."""

    stage: int = 0
    processes: int = 1
    offload: bool = False

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Sharding":
        """As the launcher set it up."""
        plugin = accelerator.state.deepspeed_plugin
        if plugin is None:
            return cls()
        zero = plugin.deepspeed_config.get("zero_optimization", {})
        offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        return cls(plugin.zero_stage, accelerator.num_processes, offload and accelerator.device.type != "cpu")


def standing(optimizer: str, trained: Sequence[Tensor], weights: int, sharding: Sharding) -> Estimate:
    """What a run holds whatever it reads.

    Args:
        optimizer: `adamw` or `adafactor`.
        trained: the trained weights, on any device (meta too).
        weights: bytes of all weights, frozen ones and those of other models included.
        sharding: how DeepSpeed spreads them.
    """
    count = sum(weight.numel() for weight in trained)
    masters = sum(FLOAT * weight.numel() for weight in trained if weight.dtype != torch.float32)
    state = 2 * FLOAT * count  # AdamW: two moments
    if optimizer == "adafactor":  # a row and a column for each matrix, a vector whole
        state = sum(FLOAT * (sum(w.shape[-2:]) if w.dim() > 1 else w.numel()) for w in trained)
    stage, processes, offload = sharding
    if stage:
        masters, state = (0, 0) if offload else (masters // processes, state // processes)
    stays = {"weights": weights // processes if stage == 3 else weights, "masters": masters, "optimiser": state}
    return Estimate(stays, FLOAT * count // (processes if stage >= 2 else 1))


def weights_bytes(modules: Sequence[nn.Module]) -> int:
    """Bytes of all weights of some modules; what they share counts once."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def cache_bytes(backbone: Backbone, tokens: int, rows: int) -> int:
    """Bytes of sampling: keys and values of `tokens` tokens, and the logits of `rows` rows with what is drawn from them."""
    size = backbone.model.dtype.itemsize
    drawn = size + 3 * FLOAT + 8  # logits; in float32, less their largest, their exponentials; a float64 sum
    return backbone.cached_numbers * size * tokens + drawn * backbone.model.config.vocab_size * rows


class Memory:
    """The memory of one run's device, as this process sees it: what is free, what is needed, what was needed.

    On a CPU this is the resident memory of the process; on a GPU what torch has allocated.
    """

    def __init__(self, accelerator: Accelerator, limit: float) -> None:
        self.device, self.limit = accelerator.device, limit
        self.sharding = Sharding.of(accelerator)
        gc.collect()  # of an earlier run in this process
        give_back()
        self.base = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.base = psutil.Process().memory_info().rss
            _reset_peak()

    def free(self) -> int:
        """Bytes that this process could hold in all, with what it holds already; `memory_limit` where that is set."""
        if self.limit:
            return int(self.limit * GIB)
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        held, beside = psutil.Process().memory_info().rss, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return held + min(psutil.virtual_memory().available, _left_in_group()) // beside

    def peak(self) -> int:
        """The most bytes that were held since the run began."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except OSError:  # not Linux
            import resource

            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else most * 1024

    def foresee(self, config: ModelConfig, copies: int = 0) -> None:
        """Refuse a model before it is loaded, where its weights and their training alone are too much.

        Args:
            config: a stage's settings.
            copies: frozen copies of the model that stay beside a policy of which all weights are trained.

        Raises:
            UserError: if they do not fit.
        """
        source = load_config(base_of(str(resolve_model(config.model)))[0])
        try:
            with torch.device("meta"):
                model = model_class(source).from_config(source, dtype=compute_dtype(config.dtype))
        except (ValueError, KeyError):  # an architecture that loading will refuse, with its reason
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
        together: bool,
    ) -> str:
        """The table of a run whose models are loaded and whose optimiser is not made yet; "" for a model that fits anywhere.

        Args:
            module: what is trained.
            frozen: other models that are kept.
            phases: the bytes that each phase adds; `learning` is one of them.
            together: see `Estimate`.

        Raises:
            UserError: if the device has less.
        """
        weights = weights_bytes([module, *frozen])
        if weights < SMALL:
            return ""
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        found = self._estimate(config, trained, weights)
        found = replace(found, phases={name: size() for name, size in phases.items()}, together=together)
        self._require(found, config)
        return found.table(self.free())

    def _estimate(self, config: ModelConfig, trained: Sequence[Tensor], weights: int) -> Estimate:
        assert isinstance(config, RunConfig)
        found = standing(config.optimizer, trained, weights, self.sharding)
        heap, beside = (0.0, 0) if self.device.type == "cuda" else (HEAP, BESIDE)
        return replace(found, stays=found.stays | {"process": self.base + beside}, heap=heap)

    def _require(self, estimate: Estimate, config: ModelConfig) -> None:
        free = self.free()
        if estimate.total > free:
            raise UserError(
                f"model '{config.model}': training needs about {estimate.total / GIB:.1f} GiB a process, but "
                f"{free / GIB:.1f} GiB are free on {self.device}; what saves most comes first: "
                f"{'; '.join(suggestions(estimate, config, self.sharding))}; memory_limit {math.ceil(estimate.total / GIB)} "
                "starts it nevertheless"
            )


def suggestions(estimate: Estimate, config: ModelConfig, sharding: Sharding) -> list[str]:
    """Settings that save memory, with the GiB that each saves about, the most first."""
    assert isinstance(config, RunConfig)
    stays, learning = estimate.stays, estimate.phases.get("learning", 0)
    state = stays["masters"] + stays["optimiser"] + estimate.gradients
    found = []
    if not config.lora_rank:
        found += [(state, "lora_rank 16"), (stays["optimiser"], "optimizer adafactor")]
    if not config.gradient_checkpointing:
        # Seen on SmolLM2-135M, a ranking and a rollout: two thirds of what learning holds.
        found.append((2 * learning // 3, "gradient_checkpointing true"))
    found.append((learning // 2, f"micro_batch_tokens {max(1, config.micro_batch_tokens // 2)}"))
    if sharding.stage < 3:
        found.append(((state + stays["weights"]) // 2, "ZeRO-3 on two processes (docs/clusters.md)"))
    else:
        found.append(((state + stays["weights"]) // 2, "twice the processes"))
    worth = sorted(((size, text) for size, text in found if size > 0.01 * estimate.total), reverse=True)
    return [f"{text} (about {size / GIB:.1f} GiB)" for size, text in worth] or ["a smaller model"]


def _reset_peak() -> None:
    """Let the kernel forget the process's peak, which may be that of an earlier stage; see proc_pid_clear_refs(5)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _left_in_group() -> int:
    """Bytes that the control group (a container) still allows; file pages that can be dropped count as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        cold = next(
            int(line.split()[1]) for line in (root / "memory.stat").read_text().splitlines() if "inactive_file" in line
        )
    except (OSError, ValueError, StopIteration):
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - used + cold)
