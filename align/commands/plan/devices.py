"""Devices by their datasheets, the FLOP/s that runs reached on them, and how a stage's models fit into their memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from align.core.errors import UserError
from align.models.backbone import Backbone
from align.runtime.flops import PEAKS, peak_flops
from align.training.memory import Sharding, resident_memory, weights_bytes
from align.training.run_folder import read_metrics

GIB = 2**30
USABLE = 0.8
"""Share of a device's memory that a plan fills. The rest is for activations, its context, communication and fragments."""
STAGE_OF_SETTING = {"prompt_loss_weight": "sft", "centering_weight": "reward", "rollout_size": "ppo"}
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


def find_device(name: str, dtype: torch.dtype) -> Device:
    """Return a device of `DEVICES`, or for `cpu` this machine's processor: its peak is measured, no bandwidth bounds it."""
    if name != "cpu":
        return DEVICES[name]
    import psutil

    return Device(peak_flops(torch.device("cpu"), dtype), float(psutil.virtual_memory().total), float("inf"))


class Measured(NamedTuple):
    """A run's measurements: its stage, FLOPs and seconds, and its responses' mean length as a share of max_new_tokens."""

    stage: str
    flops: float
    seconds: float
    response_share: float
    """0 of a run that samples nothing."""


class Speeds:
    """FLOP/s of all devices together, by stage, from measured runs."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        self.runs = runs

    def flops_per_second(self, stage: str) -> float | None:
        """FLOP/s of the stage's own runs, else of all runs; None without any."""
        chosen = [run for run in self.runs if run.stage == stage] or self.runs
        return sum(run.flops for run in chosen) / sum(run.seconds for run in chosen) if chosen else None

    @property
    def response_share(self) -> float:
        """Mean response length as a share of max_new_tokens; 1 if nothing was sampled."""
        shares = [run.response_share for run in self.runs if run.response_share]
        return sum(shares) / len(shares) if shares else 1.0


def read_speed(folder: str) -> Measured:
    """Read the speed that a run reached; its first update, which warms up kernels and caches, counts only if it is alone.

    Raises:
        UserError: if the folder is no run of a stage, or holds no update.
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
    lengths = [line["text/length"] / settings["max_new_tokens"] for line in lines if "text/length" in line]
    return Measured(stage, sum(line["flops"] for line in lines), seconds, sum(lengths) / len(lengths) if lengths else 0.0)


@dataclass(frozen=True)
class HeldModel:
    """A model in memory during a stage: its trained weights, and the bytes of all its weights."""

    trained: Sequence[Tensor]
    weights: int


def trained_model(backbone: Backbone, only_trained: bool = False) -> HeldModel:
    """Return a model that is trained.

    Args:
        only_trained: count only trained weights, because another model holds the frozen ones (adapters on one base).
    """
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    held = sum(weight.numel() * weight.element_size() for weight in trained) if only_trained else weights_bytes([backbone])
    return HeldModel(trained, held)


def frozen_model(weights: int) -> HeldModel:
    """Return a model that is not trained, of `weights` bytes."""
    return HeldModel([], weights)


@dataclass(frozen=True)
class Layout:
    """A way to place a stage on devices.

    Attributes:
        launcher: the file in configs/accelerate/.
        roles: bytes on a device that each role holds permanently, including gradients.
        total: bytes at the peak.
        fits: whether a device has that much.
    """

    name: str
    launcher: str
    roles: dict[str, int]
    total: int
    fits: bool


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
    """Compute the memory that each way to place a stage needs.

    Args:
        memory: bytes of a device.
    """
    found = []
    for name, launcher, sharding in placements(gpu, devices):
        parts = {role: resident_memory(optimizer, held.trained, held.weights, sharding) for role, held in roles.items()}
        bytes_of = {role: sum(part.resident.values()) + part.gradients for role, part in parts.items()}
        total = sum(bytes_of.values())
        found.append(Layout(name, launcher, bytes_of, total, total <= USABLE * memory))
    return found


def first_that_fits(found: Sequence[Layout]) -> Layout | None:
    """Return the first layout that fits, or None."""
    return next((layout for layout in found if layout.fits), None)
