"""`align plan`: compute-optimal model size, and time and memory of each stage.

FLOPs of each phase are computed from the settings and data, with the same formulas as in runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from align.batches.encoding import Limits, encode_demonstrations, encode_prompts, encode_rankings
from align.batches.mixtures import encode_mixture, hold_out, split_by_opening
from align.core.errors import UserError
from align.core.settings import ModelConfig, Settings, option, require_setting
from align.core.settings_parser import parse
from align.extras.scaling import (
    CHINCHILLA_FIT,
    FLOPS_PER_WEIGHT,
    INFERENCE_FLOPS_PER_WEIGHT,
    REPLICATED_FIT,
    ScalingLaw,
    TrainingRun,
    allocate,
    fit_scaling_law,
    read_training_runs,
)
from align.model_registry.registry import resolve_model
from align.models.backbone import flops_profile
from align.models.folders import base_of
from align.models.loading import LoadedModel, freeze_unused_lm_head, load_on_meta
from align.models.roles import REWARD_ADAPTER
from align.ppo.config import PPOConfig
from align.ppo.flops import RoleFlopsProfiles, phase_flops
from align.reward.config import RewardConfig
from align.reward.remote import is_url
from align.reward.train import example_flops as ranking_flops
from align.runtime.distributed import compute_dtype
from align.runtime.flops import PEAKS, peak_flops
from align.sampling.generation import SamplingParams
from align.sft.config import SFTConfig
from align.sft.raw_text import RawText
from align.sft.train import example_flops, require_prompt_in_row
from align.training.data_order import DataOrder
from align.training.memory import GIB, Sharding, resident_memory, weights_bytes

USABLE = 0.8
"""Fraction of device memory to plan for. The rest is for activations, context, communication and fragmentation."""


class Device(NamedTuple):
    """A GPU's datasheet: dense bfloat16 FLOP/s, memory in bytes, memory bandwidth in bytes/s."""

    peak: float
    memory: float
    bandwidth: float


DEVICES = {  # memory in GB (10^9 bytes)
    "A100-40": Device(PEAKS["A100"], 40e9, 1.555e12),
    "A100-80": Device(PEAKS["A100"], 80e9, 2.039e12),
    "H100": Device(PEAKS["H100"], 80e9, 3.35e12),
    "H100-PCIe": Device(PEAKS["H100 PCIe"], 80e9, 2.0e12),
    "H200": Device(PEAKS["H200"], 141e9, 4.8e12),
    "L40S": Device(PEAKS["L40S"], 48e9, 0.864e12),
    "L4": Device(PEAKS["L4"], 24e9, 0.3e12),
}
"""From NVIDIA's datasheets (SXM version if there are two)."""


@dataclass(kw_only=True)
class PlanConfig(Settings):
    """Plan a training run: compute-optimal model size, and time and memory of each stage."""

    flops: float = option(0.0, "Compute budget in FLOPs. Prints the compute-optimal model size and token count.", ge=0)
    runs: str = option(
        "", "File with your runs: rows of N (parameters), D (tokens) and loss. Fits the Chinchilla scaling law to them."
    )
    inference_tokens: float = option(
        0.0, "Tokens to be processed at inference. Prints a smaller model trained for longer, as LLaMA does.", ge=0
    )
    model: str = option("", "Model for every stage, overriding the configs. Only its config and tokenizer are loaded.")
    sft: str = option("", "SFT config to plan: a YAML file, or config.yaml of a run.")
    reward: str = option("", "Reward model config to plan.")
    ppo: str = option("", "PPO config to plan.")
    gpu: str = option(
        "auto",
        "Device. cpu measures the peak of this machine. auto selects this machine's GPU, or cpu.",
        choices=(*DEVICES, "cpu", "auto"),
    )
    gpus: int = option(1, "Number of devices.", gt=0)
    mfu: float = option(
        0.4,
        "Expected model FLOPs utilization (PaLM, table 3: 0.462). A short run reports it as `speed/mfu`.",
        gt=0,
        le=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "inference_tokens", bool(self.flops or not self.inference_tokens), "set together with flops")


def device_name(gpu: str) -> str:
    """Return the device name, detecting this machine's for `auto`.

    Raises:
        UserError: if the GPU is not in the list.
    """
    if gpu != "auto":
        return gpu
    if not torch.cuda.is_available():
        return "cpu"
    found, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    same = [name for name in DEVICES if name.partition("-")[0] in re.split(r"[ -]", found)]
    if not same:
        raise UserError(f"gpu: unknown device {found}; use one of {', '.join(DEVICES)}")
    return min(same, key=lambda name: abs(DEVICES[name].memory - memory))


class StageWork(NamedTuple):
    """Work of a planned stage.

    Attributes:
        flops: FLOPs of each phase, over the entire run and all devices.
        weights: size of the weights of all models in memory, in bytes.
        trained: the weights that are trained.
        decoded: size of the weights that one device reads per sampled token, in bytes.
    """

    name: str
    config: SFTConfig | RewardConfig | PPOConfig
    flops: dict[str, float]
    weights: int
    trained: Sequence[Tensor]
    decoded: float = 0.0

    def hours(self, gpu: str, gpus: int, mfu: float) -> dict[str, float]:
        """Return the hours of each phase. With small batches, sampling is limited by memory bandwidth."""
        device = find_device(gpu, compute_dtype(self.config.dtype))
        least = {"sampling": self.decoded / device.bandwidth}
        seconds = {phase: flops / (gpus * device.peak * mfu) for phase, flops in self.flops.items()}
        return {phase: max(value, least.get(phase, 0.0)) / 3600 for phase, value in seconds.items()}


class Layout(NamedTuple):
    """A placement of a stage on devices: the file in configs/accelerate/, and the bytes per device."""

    name: str
    launcher: str
    needed: int | None
    """None if not supported, such as a quantized base with ZeRO-3."""


def run_plan(config: PlanConfig) -> None:
    """Print a plan. Raise a UserError if there is nothing to plan, or for errors in settings or data."""
    if not any((config.flops, config.runs, config.sft, config.reward, config.ppo)):
        raise UserError("nothing to plan; set flops, runs, or the config of a stage (sft, reward, ppo)")
    stages, parts = plan_stages(config), []
    laws = {"Chinchilla, approach 3": CHINCHILLA_FIT, "Besiroglu et al. 2024": REPLICATED_FIT}
    if config.runs:
        runs = read_training_runs(config.runs)
        laws = {config.runs: fit_scaling_law(runs)} | laws
        parts.append(describe_fit(runs, laws[config.runs], config.flops))
    if config.flops:
        parts.append(budget_table(config.flops, laws, config.inference_tokens))
    if stages:
        gpu = device_name(config.gpu)
        parts += [hours_table(stages, gpu, config.gpus, config.mfu), memory_table(stages, gpu, config.gpus)]
    print("\n\n".join(parts))


def budget_table(flops: float, laws: Mapping[str, ScalingLaw], inference_tokens: float) -> str:
    """Format model size, tokens and loss for a compute budget by each scaling law, then with inference."""
    size, tokens = allocate(flops)
    first = f"{flops:.3g} FLOPs by Chinchilla's table 3: N = {count(size)} parameters on D = {count(tokens)} tokens"
    rows, cheapest = [], []
    for name, law in laws.items():
        size, tokens = law.allocate(flops)
        rows.append([name, count(size), count(tokens), f"{tokens / size:.1f}", f"{law.loss(size, tokens):.3f}"])
        if inference_tokens:
            small, longer = law.allocate_with_inference(flops, inference_tokens)
            total = small * (FLOPS_PER_WEIGHT * longer + INFERENCE_FLOPS_PER_WEIGHT * inference_tokens)
            saved = 1 - total / (flops + INFERENCE_FLOPS_PER_WEIGHT * size * inference_tokens)
            cheapest.append([name, count(small), count(longer), f"{longer / small:.1f}", f"{saved:.1%}"])
    heads = ["fit of the loss", "N", "D", "D/N"]
    parts = [f"{first} ({allocate(flops)[1] / allocate(flops)[0]:.1f} a parameter)\n{_table([*heads, 'loss'], rows)}"]
    if cheapest:
        what = f"same loss with the fewest FLOPs for training and {count(inference_tokens)} tokens of inference"
        parts.append(f"{what}\n{_table([*heads, 'FLOPs saved'], cheapest)}")
    return "\n\n".join(parts)


def describe_fit(runs: Sequence[TrainingRun], law: ScalingLaw, flops: float) -> str:
    """Describe a fit to the user's runs: coefficients, largest error, and extrapolation to the budget."""
    error = max(abs(law.loss(run.parameters, run.tokens) / run.loss - 1) for run in runs)
    numbers = ", ".join(f"{name} = {value:.4g}" for name, value in law._asdict().items())
    text = f"fit of {len(runs)} runs: {numbers}; maximum relative error of the loss {error:.2%}"
    largest = max(FLOPS_PER_WEIGHT * run.parameters * run.tokens for run in runs)
    return text + (f"; the budget is {flops / largest:.3g} times the largest run" if flops > largest else "")


def plan_stages(config: PlanConfig) -> list[StageWork]:
    """Plan every stage in the settings."""
    kinds: list[tuple[str, type[Any], Callable[[Any], StageWork]]] = [
        (config.sft, SFTConfig, sft_work),
        (config.reward, RewardConfig, reward_work),
        (config.ppo, PPOConfig, partial(ppo_work, devices=config.gpus)),
    ]
    plans = []
    for file, kind, count_work in kinds:
        if file:
            settings = parse(kind, ["--config", file, *(["--model", config.model] if config.model else [])])
            if device_name(config.gpu) != "cpu" and settings.dtype == "auto":
                settings = replace(settings, dtype="bfloat16")
            plans.append(count_work(settings))
    return plans


def hours_table(stages: Sequence[StageWork], gpu: str, gpus: int, mfu: float) -> str:
    """Format FLOPs and hours of each phase of each stage."""
    rows = []
    for stage in stages:
        hours = stage.hours(gpu, gpus, mfu)
        parts = [(phase, flops, hours[phase]) for phase, flops in stage.flops.items() if flops]
        if len(parts) > 1:
            parts.append(("all", sum(stage.flops.values()), sum(hours.values())))
        rows += [[stage.name, phase, f"{flops:.3g}", f"{spent:.4g}"] for phase, flops, spent in parts]
    table = _table(["stage", "phase", "FLOPs", "hours"], rows)
    return f"{gpus} x {gpu}, at {mfu:.0%} of their peak\n{table}"


def memory_table(stages: Sequence[StageWork], gpu: str, gpus: int) -> str:
    """Format GiB per device for each placement of each stage, and the first launcher file that fits."""
    lines, rows = [], []
    for stage in stages:
        ways = layouts(stage, gpu, gpus)
        usable = USABLE * find_device(gpu, compute_dtype(stage.config.dtype)).memory
        fitting = (layout for layout in ways if layout.needed is not None and layout.needed <= usable)
        chosen = next(fitting, None)  # the simplest that fits
        advice = "no configuration fits; use more devices, LoRA or a smaller model"
        if chosen:
            advice = f"use configs/accelerate/{chosen.launcher} with num_processes {gpus}"
        lines.append(f"{stage.name}: {advice}")
        rows.append([stage.name, *("-" if layout.needed is None else f"{layout.needed / GIB:.2f}" for layout in ways)])
    table = _table(["stage", *(name for name, _, _ in placements(gpu, gpus))], rows)
    return "\n".join([f"GiB per {gpu}, without activations", table, *lines])


def count(number: float) -> str:
    """Format a large number: 1.5e9 is 1.5 B."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= size:
            return f"{number / size:.4g}{name}"
    return f"{number:.4g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])

    return "\n".join(f"  {aligned(line)}" for line in lines)


def find_device(name: str, dtype: torch.dtype) -> Device:
    """Return a device of `DEVICES`. For `cpu`, measure the peak of this machine, without a bandwidth limit."""
    if name != "cpu":
        return DEVICES[name]
    return Device(peak_flops(torch.device("cpu"), dtype), float(psutil.virtual_memory().total), float("inf"))


def placements(gpu: str, devices: int) -> list[tuple[str, str, Sharding]]:
    """List the placements of a stage on devices, simplest first, with the launcher file."""
    if gpu == "cpu":
        return [("one copy each", "one-process.yaml" if devices == 1 else "cpu2.yaml", Sharding())]
    if devices == 1:
        return [("whole", "one-process.yaml", Sharding()), ("ZeRO-3 offload", "zero3-offload.yaml", Sharding(3, 1, True))]
    if devices > 8:  # the other launcher files are for one machine
        return [("ZeRO-3", "two-nodes.yaml", Sharding(3, devices))]
    sharded = [(f"ZeRO-{stage}", f"zero{stage}.yaml", Sharding(stage, devices)) for stage in (1, 2, 3)]
    offload = ("ZeRO-3 offload", "zero3-offload.yaml", Sharding(3, devices, True))
    return [("whole", "ddp.yaml", Sharding()), *sharded, offload]


def layouts(work: StageWork, gpu: str, devices: int) -> list[Layout]:
    """Compute the bytes per device of each placement of a stage."""

    def needed(sharding: Sharding) -> int | None:
        if work.config.quantization and sharding.stage == 3:
            return None
        return resident_memory(work.config.optimizer, work.trained, work.weights, sharding).total

    return [Layout(name, launcher, needed(sharding)) for name, launcher, sharding in placements(gpu, devices)]


# ------------------------------------------------------------------------------------------------- FLOPs of stages


def sft_work(config: SFTConfig) -> StageWork:
    """Compute the work of training on demonstrations or raw text.

    Raises:
        UserError: if the settings, the model or the data are invalid.
    """
    loaded = load_on_meta(config, compute_dtype(config.dtype), prefix_lm=config.prefix_lm)
    require_prompt_in_row(loaded, config.prompt_loss_weight)
    read: Callable[[Any], list[Any]] = partial(
        encode_demonstrations, loaded=loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows
    )
    if config.objective != "demonstrations":
        texts = RawText(config.objective, loaded, config.text_tokens, config.seed, config.skip_bad_rows)
        read = texts.read_examples
    profile = flops_profile(loaded.backbone, loaded.adapter)
    cost = partial(example_flops, profile, prompt_weight=config.prompt_loss_weight)
    return _learning("sft", config, read, cost, loaded)


def reward_work(config: RewardConfig) -> StageWork:
    """Compute the work of training on rankings. For errors, see `sft_work`."""
    loaded = load_on_meta(config, compute_dtype(config.dtype), REWARD_ADAPTER, allow_reward_model=True)
    read = partial(encode_rankings, loaded=loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows)
    if not config.lm_loss_weight:
        freeze_unused_lm_head(loaded.backbone)
    profile = flops_profile(loaded.backbone, loaded.adapter)
    cost = partial(ranking_flops, loaded.backbone, profile, lm_weight=config.lm_loss_weight)
    return _learning("reward", config, read, cost, loaded)


def _learning(
    name: str,
    config: SFTConfig | RewardConfig,
    read: Callable[[Any], list[Any]],
    cost: Callable[[Any], float],
    loaded: LoadedModel,
) -> StageWork:
    """Work of a stage that trains on examples of this cost in FLOPs. Sources may be over- or undersampled."""
    mixed, _ = hold_out(encode_mixture(config.train_data, read, config.task_prefixes), config.validation_split)
    order = DataOrder(mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature)
    epoch, start = 0.0, 0
    for size, count in zip(order.sizes, order.counts, strict=True):
        epoch += count * fmean(map(cost, mixed.examples[start : start + size]))
        start += size
    phases = {"learning": config.num_train_epochs * epoch}
    return StageWork(name, config, phases, weights_bytes([loaded.backbone]), _trained(loaded))


def ppo_work(config: PPOConfig, devices: int) -> StageWork:
    """Compute the work of sampling, scoring and training, with average prompts and responses of maximum length.

    A separate critic, and a reward model that does not exist yet, have the policy's shape. For errors, see `sft_work`.
    """
    loaded = load_on_meta(config, compute_dtype(config.dtype))
    limits, backbone = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong), loaded.backbone
    encoded = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    prompts, _ = split_by_opening(encoded, config.validation_split)
    local = [name for name in config.reward_model if not is_url(name)]
    policy, rewards = flops_profile(backbone, loaded.adapter), [_reward_model(name, loaded) for name in local]
    separate = config.critic == "separate"
    profiles = RoleFlopsProfiles(
        policy=policy,
        reference=flops_profile(backbone, loaded.initial_adapter),
        critic=policy if separate else None,
        rewards=tuple(flops_profile(model.backbone, model.adapter) for model in rewards),
    )
    length = round(fmean(len(prompt.ids) for prompt in prompts))
    responses = [config.max_new_tokens] * config.samples_per_prompt
    groups = [(length, responses)] if backbone.shares_prompts else [(length, responses[:1])] * len(responses)
    times = config.total_updates * config.rollout_batch_size / len(responses)
    critic_epochs = config.epochs - config.num_ppo_epochs if config.has_critic else 0
    of_update = phase_flops(profiles, groups, config.num_ppo_epochs, critic_epochs)
    phases = {name: times * flops for name, flops in of_update.items()}
    own_rows, in_batch = -(-config.rollout_batch_size // devices), SamplingParams.batch_tokens // (length + responses[0])
    batches = config.total_updates * -(-own_rows // max(1, in_batch))
    trained, backbone_bytes = _trained(loaded), weights_bytes([backbone])
    copies = 0 if loaded.adapter else 1  # with adapters, one base serves the reference too
    weights = backbone_bytes * (1 + copies) + sum(
        weights_bytes([model.backbone]) for model in rewards if model is not loaded
    )
    if separate:
        weights += sum(weight.numel() * weight.element_size() for weight in trained)
        trained = trained * 2
    return StageWork("ppo", config, phases, weights, trained, decoded=backbone_bytes * config.max_new_tokens * batches)


def _trained(loaded: LoadedModel) -> list[Tensor]:
    return [weight for weight in loaded.backbone.parameters() if weight.requires_grad]


def _reward_model(name: str, policy: LoadedModel) -> LoadedModel:
    """Load the reward model without tokenizer and weights. Returns the policy itself if both are adapters on one base."""
    try:
        base, is_adapter = base_of(str(resolve_model(name)))
    except UserError:  # not trained yet
        return policy if policy.adapter else replace(policy)  # assume a separate model of the policy's shape
    if is_adapter and policy.adapter and base == policy.base:
        return policy
    dtype = policy.backbone.model.dtype
    return load_on_meta(ModelConfig(model=name), dtype, REWARD_ADAPTER, allow_reward_model=True)
