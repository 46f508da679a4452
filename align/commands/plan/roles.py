"""Memory of each role under each kind of sharding, and the first launcher file that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from align.models.backbone import Backbone
from align.training.memory import MemoryEstimate, Sharding, resident_memory, weights_bytes

USABLE = 0.9
"""Share of a device's memory that a plan fills: the rest is for its context, communication and fragments."""


@dataclass(frozen=True)
class HeldModel:
    """A model in memory during a stage: its trained weights, and the bytes of all its weights."""

    trained: Sequence[Tensor]
    weights: int


def trained_model(backbone: Backbone, only_trained: bool = False) -> HeldModel:
    """A model that is trained.

    Args:
        only_trained: count only trained weights, because another model holds the frozen ones (adapters on one base).
    """
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    held = sum(weight.numel() * weight.element_size() for weight in trained) if only_trained else weights_bytes([backbone])
    return HeldModel(trained, held)


def frozen_model(weights: int) -> HeldModel:
    """A model that is not trained, of `weights` bytes."""
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
    """The ways to place a stage on devices, with the launcher's file, the simplest first."""
    if gpu == "cpu":
        return [("one copy each", "cpu.yaml" if devices == 1 else "cpu2.yaml", Sharding())]
    if devices == 1:
        return [("whole", "one-gpu.yaml", Sharding()), ("ZeRO-3 offload", "zero3-offload.yaml", Sharding(3, 1, True))]
    found = [("whole", "ddp.yaml", Sharding())]
    found += [(f"ZeRO-{stage}", f"zero{stage}.yaml", Sharding(stage, devices)) for stage in (1, 2, 3)]
    found.append(("ZeRO-3 offload", "zero3-offload.yaml", Sharding(3, devices, True)))
    if devices > 8:  # the files for one machine are for at most 8
        return [("ZeRO-3", "two-nodes.yaml", Sharding(3, devices))]
    return found


def layouts(
    roles: Mapping[str, HeldModel], temporary: int, optimizer: str, memory: float, gpu: str, devices: int
) -> list[Layout]:
    """The memory that each way to place a stage needs.

    Args:
        temporary: bytes of activations and logits at the peak.
        memory: bytes of a device.
    """
    found = []
    for name, launcher, sharding in placements(gpu, devices):
        parts = {role: resident_memory(optimizer, held.trained, held.weights, sharding) for role, held in roles.items()}
        bytes_of = {role: sum(part.resident.values()) + part.gradients for role, part in parts.items()}
        gradients = sum(part.gradients for part in parts.values())
        resident = {role: sum(part.resident.values()) for role, part in parts.items()}
        total = replace(MemoryEstimate(resident, gradients), phases={"learning": temporary}).total
        found.append(Layout(name, launcher, bytes_of, total, total <= USABLE * memory))
    return found


def first_that_fits(found: Sequence[Layout]) -> Layout | None:
    """The first layout that fits, or None."""
    return next((layout for layout in found if layout.fits), None)
