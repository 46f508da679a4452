"""KL controllers of TRL 0.4 to 0.11, and running moments of scores."""

import torch
from torch import Tensor

from align.ppo.losses import KLController
from align.trl.legacy.config import PPOConfig


class _Controller(KLController):
    @property
    def value(self) -> float:
        """Coefficient of the KL penalty."""
        return self.coef

    @value.setter
    def value(self, value: float) -> None:
        self.coef = value


class AdaptiveKLController(_Controller):
    """Adapts the KL coefficient to keep the KL near a target (Ziegler et al. 2019, section 2.2).

    Args:
        init_kl_coef: initial coefficient.
        target: target KL, in nats per response.
        horizon: number of responses over which the coefficient adapts.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef, target, horizon)


class FixedKLController(_Controller):
    """Keeps the KL coefficient constant."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(kl_coef)


def kl_controller(config: PPOConfig) -> AdaptiveKLController | FixedKLController:
    """Return the controller selected by the settings."""
    if config.adap_kl_ctrl:
        return AdaptiveKLController(config.init_kl_coef, config.target, int(config.horizon))
    return FixedKLController(config.init_kl_coef)


class RunningMoments:
    """Mean and unbiased standard deviation of all scores so far (parallel algorithm of Chan et al. 1979)."""

    def __init__(self) -> None:
        self.mean, self.var, self.std, self.count = 0.0, 1.0, 1.0, 1e-24

    def update(self, scores: Tensor) -> None:
        """Update the moments with the scores [B] of a step."""
        count, mean, var = len(scores), float(scores.mean()), float(scores.var(correction=0))
        delta, total = mean - self.mean, self.count + count
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, squares / total, total
        self.std = (squares / (total - 1)) ** 0.5 if total > 1 else 0.0

    def scale(self, scores: Tensor, shift_mean: bool) -> Tensor:
        """Divide scores by the standard deviation. With `shift_mean`, subtract the mean first."""
        shifted = scores - self.mean if shift_mean else scores
        return shifted / (self.std + torch.finfo(scores.dtype).eps)
