"""The command `align plan`: model size for a compute budget, and hours and memory of each stage, before training starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from align.core.errors import UserError
from align.core.settings import Settings, option
from align.core.settings_parser import parse
from align.extras.plan_work import HeldModel, StageWork, ppo_work, reward_work, sft_work
from align.ppo.config import PPOConfig
from align.reward.config import RewardConfig
from align.runtime.distributed import compute_dtype
from align.runtime.flops import PEAKS, peak_flops
from align.sft.config import SFTConfig
from align.training.memory import Sharding, resident_memory
from align.training.run_folder import read_metrics

FLOPS_PER_WEIGHT = 6
"""FLOPs of training for each weight and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)."""
SMALLEST, LARGEST = (400e6, 1.92e19), (10e12, 1.30e28)
"""Parameters and FLOPs in the first and the last row of Chinchilla's table 3: sizes between them lie on a power law."""
GIB = 2**30

USABLE = 0.8
"""Share of a device's memory that a plan fills. The rest is for activations, its context, communication and fragments."""
STAGE_OF_SETTING = {"prompt_loss_weight": "sft", "centering_weight": "reward", "rollout_batch_size": "ppo"}
"""A setting that only one of the planned stages has: it identifies the stage of a run."""


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
        "expected share of the devices' peak (PaLM: 0.462, table 3 there); small models and batches reach less",
        gt=0,
        le=1,
    )
    measured: list[str] = option(
        [],
        "runs on the same devices: their FLOP/s is used instead of mfu; a stage's own run if there is one",
    )


class Layout(NamedTuple):
    """A way to place a stage on devices, by a file in configs/accelerate/.

    Attributes:
        roles: bytes on a device that each role holds permanently, including gradients.
        total: bytes at the peak.
        fits: whether a device has that much.
    """

    name: str
    launcher: str
    roles: dict[str, int]
    total: int
    fits: bool


class StagePlan(NamedTuple):
    """The needs of a stage: its work, the hours of each phase, and ways to place it on the devices."""

    name: str
    work: StageWork
    hours: dict[str, float]
    layouts: list[Layout]


class Measured(NamedTuple):
    """A run's stage, FLOPs and seconds, and the mean length of its responses as a share of max_new_tokens, 0 without any."""

    stage: str
    flops: float
    seconds: float
    response_share: float


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
        parts.append(hours_table(config, stages))
    parts += [memory_table(stage, config.gpu, config.gpus) for stage in stages]
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
    runs = [read_speed(folder) for folder in config.measured]
    shares = [run.response_share for run in runs if run.response_share] or [1.0]
    share = sum(shares) / len(shares)
    kinds: dict[str, tuple[str, type, Callable[[Any], StageWork]]] = {
        "sft": (config.sft, SFTConfig, sft_work),
        "reward": (config.reward, RewardConfig, reward_work),
        "ppo": (config.ppo, PPOConfig, partial(ppo_work, devices=config.gpus, response_share=share)),
    }
    plans = []
    for name, (file, kind, count_work) in kinds.items():
        if file:
            settings: Any = parse(kind, ["--config", file, *(["--model", config.model] if config.model else [])])
            if config.gpu != "cpu" and settings.dtype == "auto":
                settings = replace(settings, dtype="bfloat16")
            plans.append(_plan_stage(config, name, count_work(settings), runs))
    return plans


def _plan_stage(config: PlanConfig, name: str, work: StageWork, runs: Sequence[Measured]) -> StagePlan:
    """Plan a stage at the speed of measured runs of that stage, else of all measured runs, else at the settings' MFU."""
    device = find_device(config.gpu, compute_dtype(work.config.dtype))
    chosen = [run for run in runs if run.stage == name] or runs
    rate = sum(run.flops for run in chosen) / sum(run.seconds for run in chosen) if chosen else 0.0
    hours = {}
    for phase, flops in work.flops.items():
        # Sampling a token reads every weight: on small batches memory bandwidth is the limit. Measured speeds include it.
        floor = 0.0 if rate else work.decoded.get(phase, 0.0) / device.bandwidth
        hours[phase] = max(flops / (rate or config.gpus * device.peak * config.mfu), floor) / 3600
    placed = layouts(work.roles, work.config.optimizer, device.memory, config.gpu, config.gpus)
    return StagePlan(name, work, hours, placed)


def hours_table(config: PlanConfig, stages: Sequence[StagePlan]) -> str:
    """FLOPs and hours of each phase of each stage."""
    rows = []
    for stage in stages:
        parts = [(phase, flops, stage.hours[phase]) for phase, flops in stage.work.flops.items() if flops]
        if len(parts) > 1:
            parts.append(("all", sum(stage.work.flops.values()), sum(stage.hours.values())))
        rows += [[stage.name, phase, f"{flops:.3g}", f"{spent:.4g}"] for phase, flops, spent in parts]
    speed = f"the speed of {', '.join(config.measured)}" if config.measured else f"{config.mfu:.0%} of their peak"
    return f"{config.gpus} x {config.gpu}, at {speed}\n" + _table(["stage", "phase", "FLOPs", "hours"], rows)


def memory_table(stage: StagePlan, gpu: str, devices: int) -> str:
    """GiB on a device of each role for each way to place the stage, and the launcher's file that is enough."""
    roles = list(stage.layouts[0].roles)
    rows = []
    for layout in stage.layouts:
        sizes = [f"{size / GIB:.2f}" for size in (*(layout.roles[role] for role in roles), layout.total)]
        rows.append([layout.name, *sizes, "yes" if layout.fits else "no"])
    chosen = next((layout for layout in stage.layouts if layout.fits), None)  # the simplest
    advice = "none fits: take more devices, LoRA or a smaller model"
    if chosen:
        advice = f"take configs/accelerate/{chosen.launcher} with num_processes {devices}"
    table = _table(["placed", *roles, "peak", "fits"], rows)
    return f"{stage.name}: GiB on each {gpu}, all the time by role, and at the peak\n{table}\n{advice}"


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


def read_speed(folder: str) -> Measured:
    """Read the speed that a run reached; its first update, which warms up kernels and caches, counts only if it is alone.

    Raises:
        UserError: if the folder is no run of a planned stage, or holds no update.
    """
    path = Path(folder)
    lines = [line for line in read_metrics(path) if line.get("flops") and line.get("time/update")]
    if not lines:
        raise UserError(f"{path}: no update in its metrics.jsonl; give the folder of a run of sft, reward or ppo")
    try:
        settings = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        stage = next(stage for name, stage in STAGE_OF_SETTING.items() if name in settings)
    except (OSError, yaml.YAMLError, TypeError, StopIteration) as error:
        raise UserError(f"{path}: its config.yaml is not that of a run of sft, reward or ppo") from error
    lines = lines[1:] or lines
    # Validation is in the time of an update, but not in its FLOPs.
    seconds = sum(line["time/update"] * (1 - line.get("time/validate", 0.0)) for line in lines)
    lengths = [line["response/length"] / settings["max_new_tokens"] for line in lines if "response/length" in line]
    return Measured(stage, sum(line["flops"] for line in lines), seconds, sum(lengths) / len(lengths) if lengths else 0.0)


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


def layouts(roles: Mapping[str, HeldModel], optimizer: str, memory: float, gpu: str, devices: int) -> list[Layout]:
    """Compute the memory that each way to place a stage needs, on devices with `memory` bytes."""
    found = []
    for name, launcher, sharding in placements(gpu, devices):
        parts = {role: resident_memory(optimizer, held.trained, held.weights, sharding) for role, held in roles.items()}
        bytes_of = {role: sum(part.resident.values()) + part.gradients for role, part in parts.items()}
        total = sum(bytes_of.values())
        found.append(Layout(name, launcher, bytes_of, total, total <= USABLE * memory))
    return found
