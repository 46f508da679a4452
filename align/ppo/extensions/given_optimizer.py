"""An optimizer built by the caller, and a scheduler of its learning rates that advances once per update."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from align.core.errors import UserError
from align.models.roles import Roles
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Experience
from align.training.engine import TrainEngine


class GivenOptimizer(Extension):
    """Replaces the engine's optimizer and the learning rates of the settings.

    Args:
        optimizer: optimizer over all trained weights, which must be float32. It may also contain frozen weights.
        scheduler: learning rate scheduler of the optimizer. If None, learning rates are constant.

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
            raise UserError("critic_warmup: must be 0 with `optimizers`, which have their own learning rates")

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        engine.use_optimizer(self.optimizer)

    def after_update(self, update: int, experience: Experience) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rates and the state of the scheduler; the engine saves the optimizer's state."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {"rates": rates, "scheduler": self.scheduler.state_dict() if self.scheduler else None}

    def load_state_dict(self, state: Any) -> None:
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
