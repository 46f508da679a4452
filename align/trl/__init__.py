"""TRL's `PPOTrainer` and `PPOConfig` on this library: change one import of a script that was written for TRL 1.12."""

from align.trl.config import PPOConfig
from align.trl.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
