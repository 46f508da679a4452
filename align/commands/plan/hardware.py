"""Devices, and the cost of FLOPs on them: hours, energy, CO2 and money."""

from typing import NamedTuple

import torch

from align.runtime.flops import PEAKS, FlopsProfile, peak_flops, training_flops

GIB = 2**30


class Device(NamedTuple):
    """A GPU by its datasheet: dense bfloat16 FLOP/s, bytes of memory, bytes/s of memory, watts."""

    peak: float
    memory: float
    bandwidth: float
    watts: float


DEVICES = {  # memory in NVIDIA's GB, which are 10^9 bytes
    "A100-40": Device(PEAKS["A100"], 40e9, 1.555e12, 400),
    "A100-80": Device(PEAKS["A100"], 80e9, 2.039e12, 400),
    "H100": Device(PEAKS["H100"], 80e9, 3.35e12, 700),
    "H100-PCIe": Device(PEAKS["H100 PCIe"], 80e9, 2.0e12, 350),
    "H200": Device(PEAKS["H200"], 141e9, 4.8e12, 700),
    "L40S": Device(PEAKS["L40S"], 48e9, 0.864e12, 350),
    "L4": Device(PEAKS["L4"], 24e9, 0.3e12, 72),
}
"""From NVIDIA's datasheets; the SXM version if there are two."""


class Cost(NamedTuple):
    """The cost of some hours on some devices; `kwh` and `co2` (kg) are None where no power is known."""

    hours: float
    kwh: float | None
    co2: float | None
    money: float


def find_device(name: str, dtype: torch.dtype) -> Device:
    """A device of `DEVICES`, or `cpu`: this machine's processor, measured, without a known power or bandwidth."""
    if name != "cpu":
        return DEVICES[name]
    import psutil

    return Device(peak_flops(torch.device("cpu"), dtype), float(psutil.virtual_memory().total), float("inf"), 0.0)


def cost(hours: float, devices: int, watts: float, pue: float, carbon: float, price: float) -> Cost:
    """The cost of a number of hours.

    Energy and CO2 as in LLaMA (Touvron et al. 2023, section 6): hours of all devices x watts x PUE, x kg for a kWh.
    """
    kwh = hours * devices * watts * pue / 1000 if watts else None
    return Cost(hours, kwh, None if kwh is None else kwh * carbon, hours * devices * price)


def mfu(tokens_per_second: float, shape: FlopsProfile, sequence: int, peak: float) -> float:
    """Model FLOPs utilization of a decoder's training (PaLM, appendix B).

    Args:
        tokens_per_second: over all devices.
        sequence: tokens of a row.
        peak: FLOP/s of all devices.
    """
    return tokens_per_second * training_flops(shape, 0, [sequence], sequence) / sequence / peak
