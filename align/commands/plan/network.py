"""Communication of an update relative to its computation: when more devices stop paying off.

Bytes sent by each device per byte of data, with ring algorithms (NCCL's tests, PERFORMANCE.md): all-reduce
2 (N - 1) / N, all-gather and reduce-scatter (N - 1) / N. Section 7 of ZeRO says which of them each strategy needs
(Rajbhandari et al. 2020), with the number formats of this package: gradients are summed once per update, in float32
without DeepSpeed and in bfloat16 with it, where stages 2 and 3 reduce them after each micro-batch. Latency is not counted:
it grows with N, so the shares below are lower bounds.
"""

import math
from dataclasses import dataclass

from align.commands.plan.hardware import DEVICES
from align.commands.plan.scaling import FLOPS_PER_WEIGHT

PER_MACHINE = 8
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
REACHED = 0.8
"""Share of a link's bandwidth that large messages reach: an assumption; 8 A100 reached 0.65 to 0.8 of NVLink in tests."""
WEIGHT, GRADIENT, MASTER, MOMENTS = 2, 4, 4, 8
"""Bytes of a weight in bfloat16, of its float32 gradient and master, and of AdamW's moments."""


@dataclass(frozen=True)
class Links:
    """Bytes/s that a device sends: to another one in its machine, and to another machine."""

    inside: float
    between: float


NVLINK = {
    "A100-40": Links(300e9, 25e9),
    "A100-80": Links(300e9, 25e9),
    "H100": Links(450e9, 50e9),
    "H200": Links(450e9, 50e9),
}
"""Half of the datasheets' NVLink, which counts both directions (600 and 900 GB/s), and a network port for each GPU as in
NVIDIA's DGX: 200 Gbit/s for an A100, 400 for an H100 or H200."""
PCIE = Links(31.5e9, 12.5e9 / PER_MACHINE)
"""Devices without NVLink: PCIe 4.0 x16 (16 GT/s x 16 lanes x 128/130), and 100 Gbit/s for a machine of 8."""


@dataclass(frozen=True)
class Traffic:
    """A training strategy on a number of devices.

    Attributes:
        memory: bytes on each device of weights, masters, gradients and moments; no activations.
        strategy: `whole` or the ZeRO stage.
        compute: seconds of an update spent on arithmetic.
        communication: seconds of an update spent on sending.
        fits: whether `memory` leaves a third of the device to activations.
    """

    devices: int
    strategy: str
    memory: float
    compute: float
    communication: float
    fits: bool

    @property
    def share(self) -> float:
        """Share of an update spent on communication, if nothing overlaps with it."""
        return self.communication / (self.compute + self.communication)


def links_of(gpu: str, gbits: float) -> Links:
    """A device's links; `gbits`: Gbit/s between machines for each device, 0: as its kind has."""
    links = NVLINK.get(gpu, PCIE)
    return Links(links.inside, gbits * 1e9 / 8) if gbits else links


def sent_bytes(parameters: float, devices: int, stage: int, micro_batches: int) -> float:
    """Bytes that each device sends in an update.

    Args:
        stage: of ZeRO; 0: none.
        micro_batches: of each device in an update.
    """
    one_way = (devices - 1) / devices * parameters
    if stage == 0:
        return 2 * one_way * GRADIENT
    gather, reduce = one_way * WEIGHT, one_way * WEIGHT  # DeepSpeed's gradients have the weights' format
    if stage == 1:
        return reduce + gather  # each device's share of the gradients, then the weights that it has updated
    if stage == 2:
        return micro_batches * reduce + gather
    return micro_batches * (2 * gather + reduce)  # weights before the forward and before the backward pass


def resident_bytes(parameters: float, devices: int, stage: int) -> float:
    """Bytes on each device of weights, gradients and optimizer state, as in docs/clusters.md."""
    shards = [devices if stage >= least else 1 for least in (3, 1, 2)]  # of weights, of optimizer state, of gradients
    gradient = WEIGHT if stage else GRADIENT
    state = MASTER + MOMENTS
    return parameters * (WEIGHT / shards[0] + state / shards[1] + gradient / shards[2])


def traffic(
    parameters: float, tokens: float, micro_tokens: float, gpu: str, mfu: float, gbits: float = 0.0
) -> list[Traffic]:
    """Every strategy on every number of devices in `COUNTS`.

    Args:
        parameters: of the model, all of them trained.
        tokens: of an update, over all devices.
        micro_tokens: of a micro-batch of a device.
        gpu: a key of `DEVICES`.
        mfu: share of the peak that arithmetic reaches.
        gbits: as in `links_of`.
    """
    device, links, found = DEVICES[gpu], links_of(gpu, gbits), []
    for devices in COUNTS:
        speed = REACHED * (links.inside if devices <= PER_MACHINE else links.between)
        computing = FLOPS_PER_WEIGHT * parameters * tokens / (devices * device.peak * mfu)
        micro_batches = max(1, math.ceil(tokens / devices / micro_tokens))
        for stage in range(4):
            held = resident_bytes(parameters, devices, stage)
            sending = sent_bytes(parameters, devices, stage, micro_batches) / speed
            strategy = f"ZeRO-{stage}" if stage else "whole"
            found.append(Traffic(devices, strategy, held, computing, sending, held <= 2 / 3 * device.memory))
    return found


def fastest_that_fits(found: list[Traffic]) -> dict[int, Traffic | None]:
    """For each number of devices, the fitting strategy with the least communication; the simpler one if equal."""
    best: dict[int, Traffic | None] = {}
    for devices in dict.fromkeys(item.devices for item in found):
        fitting = [item for item in found if item.devices == devices and item.fits]
        best[devices] = min(fitting, key=lambda item: item.communication, default=None)
    return best
