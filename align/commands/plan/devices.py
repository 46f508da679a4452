"""Devices by their datasheets, and the FLOP/s that runs reached on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from align.core.errors import UserError
from align.runtime.flops import PEAKS, FlopsProfile, peak_flops, training_flops
from align.training.run_folder import read_metrics

GIB = 2**30


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
    """A device of `DEVICES`, or `cpu`: this machine's processor, whose peak is measured; no bandwidth bounds it."""
    if name != "cpu":
        return DEVICES[name]
    import psutil

    return Device(peak_flops(torch.device("cpu"), dtype), float(psutil.virtual_memory().total), float("inf"))


def mfu(tokens_per_second: float, shape: FlopsProfile, sequence: int, peak: float) -> float:
    """Model FLOPs utilization of a decoder's training (PaLM, appendix B).

    Args:
        tokens_per_second: over all devices.
        sequence: tokens of a row.
        peak: FLOP/s of all devices.
    """
    return tokens_per_second * training_flops(shape, 0, [sequence], sequence) / sequence / peak


STAGE_OF_SETTING = {"prompt_loss_weight": "sft", "centering_weight": "reward", "rollout_size": "ppo"}
"""A setting that only one of the planned stages has: it identifies the stage of a run."""


class Measured(NamedTuple):
    """A run's measurements: its stage, FLOPs and seconds, and its responses' mean length as a share of max_new_tokens."""

    stage: str
    flops: float
    seconds: float
    response_share: float
    """0 of a run that samples nothing."""


class Speeds:
    """FLOP/s of all devices together, by stage.

    Args:
        runs: what was measured; none: nothing is known.
    """

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
    """The speed that a run reached, without its first update, which warms up kernels and caches, if there are more.

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
