"""An optimizer in memory, and a scheduler of its learning rates that advances once in each update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from align.core.errors import UserError
from align.core.settings import OptimizationConfig
from align.models.roles import Roles
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Experience
from align.training.engine import TrainEngine
from align.training.optimizer import ParamGroup


@dataclass(frozen=True)
class ScheduledGroup(ParamGroup):
    """A group of a given optimizer, which holds its learning rate.

    Attributes:
        group: of the optimizer.
    """

    group: Mapping[str, Any] | None = None

    def rate(self, config: OptimizationConfig, step: int, total: int) -> float:
        """Return the rate that the scheduler, or the optimizer's maker, has set."""
        assert self.group is not None
        return float(self.group["lr"])


def require_all_weights(optimizer: Optimizer, engine: TrainEngine) -> None:
    """Raise a UserError unless a given optimizer steps the weights that the engine trains."""
    if engine.accelerator.state.deepspeed_plugin is not None:
        raise UserError("optimizers: under DeepSpeed only settings choose the optimizer; leave them out")
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    missing = sorted(name for name, master in engine.masters.items() if id(master) not in held)
    if missing:
        raise UserError(
            f"optimizers: the optimizer lacks {len(missing)} of {len(engine.masters)} trained weights ('{missing[0]}' "
            "for one): it must hold those of the policy and of a value_model, or of a PeftModel's adapter, in float32"
        )


def follow_rates(engine: TrainEngine, optimizer: Optimizer) -> None:
    """Let an engine step the groups of an optimizer at the rates that they hold."""
    engine.groups = []
    for number, group in enumerate(optimizer.param_groups):
        scheduled = ScheduledGroup(str(number or ""), frozenset(), group["lr"], 0, group)
        group["metric"] = scheduled.metric
        engine.groups.append(scheduled)


class GivenOptimizer(Extension):
    """Takes the place of the engine's optimizer and of the learning rates of the settings.

    Args:
        optimizer: over all trained weights, which must be in float32; it may hold frozen ones.
        scheduler: of that optimizer; None: the rates stay as they are.

    Raises:
        UserError: if the scheduler has no optimizer, belongs to another one, or needs a metric.
    """

    name = "optimizers"

    def __init__(self, optimizer: Optimizer | None, scheduler: LRScheduler | None = None) -> None:
        if optimizer is None:
            raise UserError("optimizers: a scheduler needs its optimizer; give both, or neither")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UserError("optimizers: ReduceLROnPlateau needs a metric in each step; give another scheduler")
        if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
            raise UserError("optimizers: the scheduler belongs to another optimizer; give both, or neither")
        self.optimizer, self.scheduler = optimizer, scheduler

    def load(self, context: TrainingContext) -> None:
        if context.critic_warmup:
            raise UserError("critic_warmup: a given optimizer has its own learning rates; set it to 0")

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        require_all_weights(self.optimizer, engine)
        engine.optimizer = self.optimizer
        follow_rates(engine, self.optimizer)

    def after_update(self, update: int, experience: Experience) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the rates and the state of the scheduler; the optimizer's is that of the engine."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {"rates": rates, "scheduler": self.scheduler.state_dict() if self.scheduler else None}

    def load_state_dict(self, state: Any) -> None:
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
