"""A plan as text for the terminal."""

from collections.abc import Sequence

from align.commands.plan.hardware import GIB, Cost
from align.commands.plan.network import REACHED, fastest_that_fits
from align.commands.plan.result import Plan, StagePlan
from align.commands.plan.roles import first_that_fits


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
        parts.append(costs(plan))
    parts += [memory(stage, plan.config.gpu, plan.config.gpus) for stage in plan.stages if stage.layouts]
    if plan.traffic:
        parts.append(sending(plan))
    return "\n\n".join(parts)


def costs(plan: Plan) -> str:
    """Hours, energy and money of each phase of each stage."""
    config = plan.config
    header = ["stage", "phase", "FLOPs", "hours", "kWh", "kg CO2", *(["cost"] if config.price else [])]
    rows = []
    for stage in plan.stages:
        parts = [(phase, stage.flops[phase], spent) for phase, spent in stage.costs.items() if stage.flops[phase]]
        if len(parts) > 1:
            parts.append(("all", sum(stage.flops.values()), stage.total))
        for phase, flops, spent in parts:
            rows.append([stage.name, phase, f"{flops:.3g}", *_amounts(spent, bool(config.price))])
    return f"{config.gpus} x {config.gpu}{_basis(plan)}\n" + _table(header, rows)


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


def sending(plan: Plan) -> str:
    """For each number of devices: the share of an update that each way spends on sending, and the strategy to use."""
    config, best = plan.config, fastest_that_fits(plan.traffic)
    names = list(dict.fromkeys(item.strategy for item in plan.traffic))
    rows = []
    for devices, taken in best.items():
        ways = [item for item in plan.traffic if item.devices == devices]
        cells = [f"{item.share:.0%}" if item.fits else "no room" for item in ways]
        chosen = ["-", "-", "-"]
        if taken:
            chosen = [taken.strategy, f"{taken.memory / GIB:.1f}", f"{taken.compute + taken.communication:.3g}"]
        rows.append([str(devices), f"{ways[0].compute:.3g}", *cells, *chosen])
    title = (
        f"{config.gpu}, {count(config.update_tokens)} tokens an update, micro-batches of {config.micro_batch_tokens}: "
        "share of an update that is sending\n"
        f"(arithmetic at {config.mfu:.0%} of the peak, links at {REACHED:.0%} of theirs)"
    )
    return f"{title}\n{_table(['devices', 'computing s', *names, 'take', 'GiB each', 'update s'], rows)}"


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


def _amounts(spent: Cost, with_money: bool) -> list[str]:
    energy = [f"{value:.3g}" if value is not None else "-" for value in (spent.kwh, spent.co2)]
    return [f"{spent.hours:.4g}", *energy, *([f"{spent.money:.2f}"] if with_money else [])]


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, the first to the left."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])

    return "\n".join(f"  {aligned(line)}" for line in lines)
