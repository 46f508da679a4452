"""Chooses what trains a module, DeepSpeed or not, and makes all processes start from the same weights."""

from collections.abc import Sequence

from torch import nn

from align.core.errors import UserError
from align.runtime.distributed import broadcast_trainable_weights, zero_stage
from align.training.optimization import Optimization
from align.training.run import Run
from align.training.schedule import RateGroup


def make_optimization(
    run: Run, module: nn.Module, total: int, groups: Sequence[RateGroup] = (), average_decay: float = 0.0
) -> Optimization:
    """The optimization of a run: plain, or DeepSpeed's where the launcher asked for it; arguments as `Optimization` has.

    Weights that were drawn (adapters, heads) become those of the first process, before an engine shards them.

    Raises:
        UserError: if ZeRO-3, which shards the weights that compute too, is to keep their mean.
    """
    broadcast_trainable_weights(module, run.accelerator)
    if run.accelerator.state.deepspeed_plugin is None:
        return Optimization(run, module, total, groups, average_decay)
    if average_decay and zero_stage(run.accelerator) == 3:
        raise UserError("a mean of the weights is not kept under ZeRO-3: set ema_decay to 0, or use ZeRO-1 or 2")
    from align.training.deepspeed_engine import DeepSpeedOptimization

    return DeepSpeedOptimization(run, module, total, groups, average_decay)
