"""The command `align plan`: model size for a compute budget, and hours and memory of each stage, before training starts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from align.core.errors import UserError
from align.core.settings import Settings, option
from align.core.settings_parser import parse
from align.extras.plan_work import StageWork, ppo_work, reward_work, sft_work
from align.ppo.config import PPOConfig
from align.reward.config import RewardConfig
from align.runtime.distributed import compute_dtype
from align.runtime.flops import PEAKS, peak_flops
from align.sft.config import SFTConfig
from align.training.memory import GIB, Sharding, resident_memory

FLOPS_PER_WEIGHT = 6
"""FLOPs of training for each weight and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)."""
SMALLEST, LARGEST = (400e6, 1.92e19), (10e12, 1.30e28)
"""Parameters and FLOPs in the first and the last row of Chinchilla's table 3: sizes between them lie on a power law."""
USABLE = 0.8
"""Share of a device's memory that a plan fills. The rest is for activations, its context, communication and fragments."""


class Device(NamedTuple):
    """A GPU by its datasheet: dense bfloat16 FLOP/s, bytes of memory, bytes/s of memory."""

    peak: float
    memory: float
    bandwidth: float


DEVICES = {  # memory in NVIDIA's GB, which are 10^9 bytes
    "A100-40": Device(PEAKS["A100"], 40e9, 1.555e12),
    "A100-80": Device(PEAKS["A100"], 80e9, 2.039e12),
    "H100": Device(PEAKS["H100"], 80e9, 3.35e12),
    "H100-PCIe": Device(PEAKS["H100 PCIe"], 80e9, 2.0e12),
    "H200": Device(PEAKS["H200"], 141e9, 4.8e12),
    "L40S": Device(PEAKS["L40S"], 48e9, 0.864e12),
    "L4": Device(PEAKS["L4"], 24e9, 0.3e12),
}
"""From NVIDIA's datasheets; the SXM version if there are two."""


@dataclass(kw_only=True)
class PlanConfig(Settings):
    """What training needs, before it starts: model size for a compute budget, hours and memory of each stage."""

    flops: float = option(0.0, "compute budget in FLOPs: prints the best model size and tokens for it; 0: none", ge=0)
    model: str = option(
        "", "model of every stage, instead of the one in its settings; only its config and tokenizer are read"
    )
    sft: str = option("", "settings of fine-tuning to plan (configs/sft/x.yaml, or config.yaml of a run); empty: none")
    reward: str = option("", "settings of a reward model to plan; empty: none")
    ppo: str = option("", "settings of PPO to plan; empty: none")
    gpu: str = option("A100-80", "device; cpu: this machine, whose peak is measured", choices=(*DEVICES, "cpu"))
    gpus: int = option(1, "number of devices", gt=0)
    mfu: float = option(
        0.4,
        "expected share of the devices' peak (PaLM: 0.462, table 3 there), such as `speed/mfu` of a short run",
        gt=0,
        le=1,
    )


class Layout(NamedTuple):
    """A way to place a stage on devices, by a file in configs/accelerate/, and the bytes that it needs on each."""

    name: str
    launcher: str
    needed: int


class StagePlan(NamedTuple):
    """The needs of a stage: its work, the hours of each phase, and ways to place it on the devices."""

    name: str
    work: StageWork
    hours: dict[str, float]
    layouts: list[Layout]


def run_plan(config: PlanConfig) -> None:
    """Print a plan. Raises: UserError if the settings ask for nothing, and for a mistake in them or in the data."""
    if not any((config.flops, config.sft, config.reward, config.ppo)):
        raise UserError("nothing to plan: give flops, or the settings files of stages as sft, reward, ppo")
    stages, parts = plan_stages(config), []
    if config.flops:
        size, tokens = allocate(config.flops)
        budget = f"N = {count(size)} parameters on D = {count(tokens)} tokens ({tokens / size:.1f} a parameter)"
        parts.append(f"{config.flops:.3g} FLOPs by Chinchilla's table 3: {budget}")
    if stages:
        parts += [hours_table(stages, config.gpu, config.gpus, config.mfu), memory_table(stages, config.gpu, config.gpus)]
    print("\n\n".join(parts))


def allocate(flops: float) -> tuple[float, float]:
    """Return the parameters and tokens that Chinchilla's table 3 gives for a number of FLOPs, about 20 tokens a parameter.

    Hoffmann et al. 2022, "Training compute-optimal large language models", arXiv 2203.15556.
    """
    exponent = math.log(LARGEST[0] / SMALLEST[0]) / math.log(LARGEST[1] / SMALLEST[1])
    parameters = SMALLEST[0] * (flops / SMALLEST[1]) ** exponent
    return parameters, flops / (FLOPS_PER_WEIGHT * parameters)


def plan_stages(config: PlanConfig) -> list[StagePlan]:
    """Plan each stage that the settings name."""
    kinds: dict[str, tuple[str, type, Callable[[Any], StageWork]]] = {
        "sft": (config.sft, SFTConfig, sft_work),
        "reward": (config.reward, RewardConfig, reward_work),
        "ppo": (config.ppo, PPOConfig, partial(ppo_work, devices=config.gpus)),
    }
    plans = []
    for name, (file, kind, count_work) in kinds.items():
        if file:
            settings: Any = parse(kind, ["--config", file, *(["--model", config.model] if config.model else [])])
            if config.gpu != "cpu" and settings.dtype == "auto":
                settings = replace(settings, dtype="bfloat16")
            plans.append(_plan_stage(name, count_work(settings), config.gpu, config.gpus, config.mfu))
    return plans


def _plan_stage(name: str, work: StageWork, gpu: str, gpus: int, mfu: float) -> StagePlan:
    device, hours = find_device(gpu, compute_dtype(work.config.dtype)), {}
    for phase, flops in work.flops.items():
        # Sampling a token reads every weight: on small batches memory bandwidth is the limit.
        floor = work.decoded.get(phase, 0.0) / device.bandwidth
        hours[phase] = max(flops / (gpus * device.peak * mfu), floor) / 3600
    return StagePlan(name, work, hours, layouts(work, gpu, gpus))


def hours_table(stages: Sequence[StagePlan], gpu: str, gpus: int, mfu: float) -> str:
    """FLOPs and hours of each phase of each stage."""
    rows = []
    for stage in stages:
        parts = [(phase, flops, stage.hours[phase]) for phase, flops in stage.work.flops.items() if flops]
        if len(parts) > 1:
            parts.append(("all", sum(stage.work.flops.values()), sum(stage.hours.values())))
        rows += [[stage.name, phase, f"{flops:.3g}", f"{spent:.4g}"] for phase, flops, spent in parts]
    table = _table(["stage", "phase", "FLOPs", "hours"], rows)
    return f"{gpus} x {gpu}, at {mfu:.0%} of their peak\n{table}"


def memory_table(stages: Sequence[StagePlan], gpu: str, gpus: int) -> str:
    """GiB on a device for each way to place each stage, and the launcher's file of the first way that fits."""
    dtypes = [compute_dtype(stage.work.config.dtype) for stage in stages]
    lines = []
    for stage, dtype in zip(stages, dtypes, strict=True):
        usable = USABLE * find_device(gpu, dtype).memory
        chosen = next((layout for layout in stage.layouts if layout.needed <= usable), None)  # the simplest
        advice = "none fits: take more devices, LoRA or a smaller model"
        if chosen:
            advice = f"take configs/accelerate/{chosen.launcher} with num_processes {gpus}"
        lines.append(f"{stage.name}: {advice}")
    rows = [[stage.name, *(f"{layout.needed / GIB:.2f}" for layout in stage.layouts)] for stage in stages]
    table = _table(["stage", *(layout.name for layout in stages[0].layouts)], rows)
    return "\n".join([f"GiB on each {gpu}, before activations", table, *lines])


def count(number: float) -> str:
    """Return 1.5e9 as 1.5 B."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= size:
            return f"{number / size:.4g}{name}"
    return f"{number:.4g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns to the right, the first to the left."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])

    return "\n".join(f"  {aligned(line)}" for line in lines)


def find_device(name: str, dtype: torch.dtype) -> Device:
    """Return a device of `DEVICES`, or for `cpu` this machine's processor: its peak is measured, no bandwidth bounds it."""
    if name != "cpu":
        return DEVICES[name]
    import psutil

    return Device(peak_flops(torch.device("cpu"), dtype), float(psutil.virtual_memory().total), float("inf"))


def placements(gpu: str, devices: int) -> list[tuple[str, str, Sharding]]:
    """List the ways to place a stage on devices, with the launcher's file, the simplest first."""
    if gpu == "cpu":
        return [("one copy each", "one-process.yaml" if devices == 1 else "cpu2.yaml", Sharding())]
    if devices == 1:
        return [("whole", "one-process.yaml", Sharding()), ("ZeRO-3 offload", "zero3-offload.yaml", Sharding(3, 1, True))]
    if devices > 8:  # the other files are for one machine
        return [("ZeRO-3", "two-nodes.yaml", Sharding(3, devices))]
    sharded = [(f"ZeRO-{stage}", f"zero{stage}.yaml", Sharding(stage, devices)) for stage in (1, 2, 3)]
    offload = ("ZeRO-3 offload", "zero3-offload.yaml", Sharding(3, devices, True))
    return [("whole", "ddp.yaml", Sharding()), *sharded, offload]


def layouts(work: StageWork, gpu: str, devices: int) -> list[Layout]:
    """Compute the bytes that each way to place a stage needs on each device."""
    found = []
    for name, launcher, sharding in placements(gpu, devices):
        needed = resident_memory(work.config.optimizer, work.trained, work.weights, sharding).total
        found.append(Layout(name, launcher, needed))
    return found
