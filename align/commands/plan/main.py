"""The command `align plan`: model size for a compute budget, and hours and memory of each stage, before training starts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from align.commands.plan.devices import DEVICES, GIB, Layout, Speeds, find_device, first_that_fits, layouts, read_speed
from align.commands.plan.work import StageWork, ppo_work, reward_work, sft_work
from align.core.errors import UserError
from align.core.settings import Settings, option
from align.core.settings_parser import parse
from align.ppo.config import PPOConfig
from align.reward.train import RewardConfig
from align.runtime.distributed import compute_dtype
from align.sft.train import SFTConfig

FLOPS_PER_WEIGHT = 6
"""FLOPs of training for each weight and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)."""
SMALLEST, LARGEST = (400e6, 1.92e19), (10e12, 1.30e28)
"""Parameters and FLOPs in the first and the last row of Chinchilla's table 3: sizes between them lie on a power law."""


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
    gpu: str = option("A100-80", "device; cpu: this machine's processor, whose peak is measured", choices=(*DEVICES, "cpu"))
    gpus: int = option(1, "number of devices", gt=0)
    mfu: float = option(
        0.4,
        "share of the devices' peak that is reached (PaLM: 0.462, table 3 there); small models and batches reach less",
        gt=0,
        le=1,
    )
    measured: list[str] = option(
        [],
        "runs on the same devices: their FLOP/s is used instead of mfu; a stage's own run if there is one",
    )


@dataclass(frozen=True)
class StagePlan:
    """The needs of a stage.

    Attributes:
        flops: of each phase, over the whole run and all devices.
        hours: of each phase.
        layouts: ways to place it on the devices.
    """

    name: str
    steps: int
    flops: dict[str, float]
    hours: dict[str, float]
    layouts: list[Layout]


def run_plan(config: PlanConfig) -> None:
    """Print a plan.

    Raises:
        UserError: if the settings ask for nothing, or for a mistake in them, the stages' settings or the data.
    """
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
    """Plan each stage that the settings name. Raises: see `run_plan`."""
    speeds = Speeds([read_speed(folder) for folder in config.measured])
    stages = []
    kinds: dict[str, tuple[str, type, Callable[[Any, int], StageWork]]] = {
        "sft": (config.sft, SFTConfig, sft_work),
        "reward": (config.reward, RewardConfig, reward_work),
        "ppo": (config.ppo, PPOConfig, partial(ppo_work, response_share=speeds.response_share)),
    }
    for name, (file, kind, count_work) in kinds.items():
        if file:
            stages.append(_stage(config, name, count_work(_settings(config, file, kind), config.gpus), speeds))
    return stages


def _settings(config: PlanConfig, file: str, kind: type) -> Any:
    """Read a stage's settings, for the model and the devices of the plan."""
    words = ["--config", file] + (["--model", config.model] if config.model else [])
    settings: Any = parse(kind, words)
    if config.gpu != "cpu" and settings.dtype == "auto":
        settings = replace(settings, dtype="bfloat16")
    return settings


def _stage(config: PlanConfig, name: str, work: StageWork, speeds: Speeds) -> StagePlan:
    device = find_device(config.gpu, compute_dtype(work.config.dtype))
    measured = speeds.flops_per_second(name)
    rate = measured or config.gpus * device.peak * config.mfu
    hours = {}
    for phase, flops in work.phases.items():
        # Sampling a token reads every weight: on small batches memory bandwidth is the limit. Measured speeds include it.
        floor = 0.0 if measured else work.decoded.get(phase, 0.0) / device.bandwidth
        hours[phase] = max(flops / rate, floor) / 3600
    placed = layouts(work.roles, work.config.optimizer, device.memory, config.gpu, config.gpus)
    return StagePlan(name, work.steps, work.phases, hours, placed)


def hours_table(config: PlanConfig, stages: Sequence[StagePlan]) -> str:
    """FLOPs and hours of each phase of each stage."""
    rows = []
    for stage in stages:
        parts = [(phase, flops, stage.hours[phase]) for phase, flops in stage.flops.items() if flops]
        if len(parts) > 1:
            parts.append(("all", sum(stage.flops.values()), sum(stage.hours.values())))
        rows += [[stage.name, phase, f"{flops:.3g}", f"{spent:.4g}"] for phase, flops, spent in parts]
    measured = f"the speed of {', '.join(config.measured)}"
    speed = measured if config.measured else f"{config.mfu:.0%} of their peak"
    return f"{config.gpus} x {config.gpu}, at {speed}\n" + _table(["stage", "phase", "FLOPs", "hours"], rows)


def memory_table(stage: StagePlan, gpu: str, devices: int) -> str:
    """GiB on a device of each role for each way to place the stage, and the launcher's file that is enough."""
    roles = list(stage.layouts[0].roles)
    rows = []
    for layout in stage.layouts:
        sizes = [f"{size / GIB:.2f}" for size in (*(layout.roles[role] for role in roles), layout.total)]
        rows.append([layout.name, *sizes, "yes" if layout.fits else "no"])
    chosen = first_that_fits(stage.layouts)
    advice = "none fits: take more devices, LoRA or a smaller model"
    if chosen:
        advice = f"take configs/accelerate/{chosen.launcher} with num_processes {devices}"
    title = f"{stage.name}: GiB on each {gpu}, all the time by role, and at the peak"
    return f"{title}\n{_table(['placed', *roles, 'peak', 'fits'], rows)}\n{advice}"


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
