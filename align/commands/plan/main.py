"""The command `align plan`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from align.commands.plan import scaling
from align.commands.plan.config import PlanConfig
from align.commands.plan.devices import Speeds, find_device, read_speed
from align.commands.plan.roles import layouts
from align.commands.plan.show import Plan, StagePlan, format_plan
from align.commands.plan.work import StageWork, ppo_work, reward_work, sft_work
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.settings_parser import parse
from align.models.backbone import flops_profile
from align.models.loading import load_shapes
from align.ppo.config import PPOConfig
from align.reward.config import RewardConfig
from align.runtime.distributed import compute_dtype
from align.runtime.flops import training_flops
from align.sft.train import SFTConfig
from align.training.memory_dry_run import pass_bytes

SEQUENCE = 2048
"""Tokens of a row in a training that has no settings file: what LLaMA and PaLM were trained on."""


def run_plan(config: PlanConfig) -> None:
    """Print a plan.

    Raises:
        UserError: see `make_plan`.
    """
    print(format_plan(make_plan(config)))


def make_plan(config: PlanConfig) -> Plan:
    """The plan that the settings ask for.

    Raises:
        UserError: if they ask for nothing, or for a mistake in them, the stages' settings or the data.
    """
    asked = (config.flops, config.fit, config.tokens, config.sft, config.reward, config.ppo)
    if not any(asked):
        raise UserError("nothing to plan: give flops, fit, tokens, or the settings files of stages as sft, reward, ppo")
    law, count = scaling.fit_file(config.fit) if config.fit else (None, 0)
    allocate = law.allocate if law else scaling.allocate
    speeds = Speeds([read_speed(folder) for folder in config.measured])
    stages = [_training(config, speeds)] if config.tokens else []
    kinds: dict[str, tuple[str, type, Callable[[Any, int], StageWork]]] = {
        "sft": (config.sft, SFTConfig, sft_work),
        "reward": (config.reward, RewardConfig, reward_work),
        "ppo": (
            config.ppo,
            PPOConfig,
            partial(ppo_work, response_tokens=config.response_tokens, response_share=speeds.response_share),
        ),
    }
    for name, (file, kind, count_work) in kinds.items():
        if file:
            stages.append(_stage(config, name, count_work(_settings(config, file, kind), config.gpus), speeds))
    return Plan(config, law, count, allocate(config.flops) if config.flops else None, stages)


def _settings(config: PlanConfig, file: str, kind: type) -> Any:
    """A stage's settings, for the model and the devices of the plan."""
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
    temporary = pass_bytes(work.passes, work.batch, backward=True)
    placed = layouts(work.roles, temporary, work.config.optimizer, device.memory, config.gpu, config.gpus)
    return StagePlan(name, work.steps, work.phases, hours, placed)


def _training(config: PlanConfig, speeds: Speeds) -> StagePlan:
    """Training on `tokens` tokens, such as pretraining, from the model's shape or its number of parameters."""
    device = find_device(config.gpu, torch.bfloat16)
    per_token = scaling.FLOPS_PER_WEIGHT * config.parameters
    if not config.parameters:
        loaded = load_shapes(ModelConfig(model=config.model), torch.bfloat16)
        per_token = training_flops(flops_profile(loaded.backbone, None), 1, [SEQUENCE - 1], SEQUENCE - 1) / SEQUENCE
    flops = per_token * config.tokens
    rate = speeds.flops_per_second("sft") or config.gpus * device.peak * config.mfu
    seconds = config.tokens / (config.tokens_per_second * config.gpus) if config.tokens_per_second else flops / rate
    return StagePlan("training", 0, {"learning": flops}, {"learning": seconds / 3600}, [])
