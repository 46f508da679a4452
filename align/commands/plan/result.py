"""The results of a plan, before they are printed."""

from dataclasses import dataclass

from align.commands.plan.config import PlanConfig
from align.commands.plan.hardware import Cost
from align.commands.plan.network import Traffic
from align.commands.plan.roles import Layout
from align.commands.plan.scaling import Allocation, ScalingLaw


@dataclass(frozen=True)
class StagePlan:
    """The needs of a stage.

    Attributes:
        flops: of each phase, over the whole run and all devices.
        costs: of each phase.
        total: of all phases.
        layouts: ways to place it on the devices; none for a training without a settings file.
    """

    name: str
    steps: int
    flops: dict[str, float]
    costs: dict[str, Cost]
    total: Cost
    layouts: list[Layout]


@dataclass(frozen=True)
class Plan:
    """All results; those not asked for are None or empty."""

    config: PlanConfig
    law: ScalingLaw | None
    runs_fitted: int
    allocation: Allocation | None
    stages: list[StagePlan]
    traffic: list[Traffic]
