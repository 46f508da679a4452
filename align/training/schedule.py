"""The learning rate of each update."""

import math
from dataclasses import dataclass

from align.core.settings import RunConfig, Schedule


@dataclass(frozen=True)
class RateGroup:
    """Weights that share a learning rate.

    Attributes:
        name: what its rate is logged under, `learning_rate/<name>`; empty: `learning_rate`.
        weights: their names in the module that is trained.
        peak: their highest learning rate.
        rest: number of first steps in which they do not change; their schedule begins after these.
    """

    name: str
    weights: frozenset[str]
    peak: float
    rest: int = 0

    @property
    def metric(self) -> str:
        """The metric of its rate."""
        return f"learning_rate/{self.name}" if self.name else "learning_rate"

    def rate(self, config: RunConfig, step: int, total: int) -> float:
        """The learning rate of a step from 1 to `total`; 0 at rest.

        At rate 0 the optimizer's moments still follow the gradients, so that the first steps after the rest are not
        larger than others.
        """
        return learning_rate(config, step - self.rest, total - self.rest, self.peak) if step > self.rest else 0.0


def learning_rate(config: RunConfig, update: int, total: int, peak: float) -> float:
    """The learning rate of an update from 1 to `total`: a linear rise during warm-up, then the schedule's decay.

    The inverse square root is T5's (section 3.1.2, 1/sqrt(max(n, k)) with warm-up k), scaled to `peak`.
    """
    warmup = math.ceil(round(config.warmup * total, 6))  # 0.07 * 100 is slightly more than 7
    if update <= warmup:
        return peak * update / warmup
    done = (update - 1 - warmup) / max(1, total - warmup)
    decay: dict[Schedule, float] = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "inverse_sqrt": math.sqrt(max(1, warmup) / max(1, update)),
    }
    return peak * decay[config.schedule]
