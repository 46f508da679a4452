"""A plan, and its text for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from align.commands.plan.config import PlanConfig
from align.commands.plan.devices import GIB
from align.commands.plan.roles import Layout, first_that_fits
from align.commands.plan.scaling import Allocation, ScalingLaw


@dataclass(frozen=True)
class StagePlan:
    """The needs of a stage.

    Attributes:
        flops: of each phase, over the whole run and all devices.
        hours: of each phase.
        layouts: ways to place it on the devices; none for a training without a settings file.
    """

    name: str
    steps: int
    flops: dict[str, float]
    hours: dict[str, float]
    layouts: list[Layout]


@dataclass(frozen=True)
class Plan:
    """All results; those not asked for are None or empty."""

    config: PlanConfig
    law: ScalingLaw | None
    runs_fitted: int
    allocation: Allocation | None
    stages: list[StagePlan]


def format_plan(plan: Plan) -> str:
    """All parts of a plan, with an empty line between them."""
    parts = []
    if plan.law:
        e, a, b, alpha, beta = plan.law
        parts.append(
            f"fitted to {plan.runs_fitted} runs of {plan.config.fit}:\n"
            f"  loss = {e:.4g} + {a:.4g} / N^{alpha:.3f} + {b:.4g} / D^{beta:.3f} nats per token"
        )
    if plan.allocation:
        size, tokens = plan.allocation
        law = "the fitted law" if plan.law else "Chinchilla's table 3"
        line = f"{plan.config.flops:.3g} FLOPs by {law}: N = {count(size)} parameters on D = {count(tokens)} tokens"
        loss = f", loss {plan.law.loss(size, tokens):.3f}" if plan.law else ""
        parts.append(f"{line} ({tokens / size:.1f} a parameter){loss}")
    if plan.stages:
        parts.append(hours(plan))
    parts += [memory(stage, plan.config.gpu, plan.config.gpus) for stage in plan.stages if stage.layouts]
    return "\n\n".join(parts)


def hours(plan: Plan) -> str:
    """FLOPs and hours of each phase of each stage."""
    config = plan.config
    rows = []
    for stage in plan.stages:
        parts = [(phase, flops, stage.hours[phase]) for phase, flops in stage.flops.items() if flops]
        if len(parts) > 1:
            parts.append(("all", sum(stage.flops.values()), sum(stage.hours.values())))
        rows += [[stage.name, phase, f"{flops:.3g}", f"{spent:.4g}"] for phase, flops, spent in parts]
    return f"{config.gpus} x {config.gpu}{_basis(plan)}\n" + _table(["stage", "phase", "FLOPs", "hours"], rows)


def memory(stage: StagePlan, gpu: str, devices: int) -> str:
    """GiB on a device of each role for each way to place the stage, and the launcher's file that is enough."""
    roles = list(stage.layouts[0].roles)
    rows = [
        [layout.name, *(f"{layout.roles[role] / GIB:.2f}" for role in roles), f"{layout.total / GIB:.2f}", _yes(layout.fits)]
        for layout in stage.layouts
    ]
    chosen = first_that_fits(stage.layouts)
    advice = "none fits: take more devices, LoRA or a smaller model"
    if chosen:
        advice = f"take configs/accelerate/{chosen.launcher} with num_processes {devices}"
    title = f"{stage.name}: GiB on each {gpu}, all the time by role, and at the peak"
    return f"{title}\n{_table(['placed', *roles, 'peak', 'fits'], rows)}\n{advice}"


def count(number: float) -> str:
    """1.5e9 as 1.5 B."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= size:
            return f"{number / size:.4g}{name}"
    return f"{number:.4g}"


def _basis(plan: Plan) -> str:
    config = plan.config
    if config.tokens_per_second and len(plan.stages) == 1:
        return f", at {config.tokens_per_second:g} tokens/s each"
    if config.measured:
        return f", at the speed of {', '.join(config.measured)}"
    return f", at {config.mfu:.0%} of their peak"


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, the first to the left."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])

    return "\n".join(f"  {aligned(line)}" for line in lines)
