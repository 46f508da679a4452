"""PPO with a KL penalty."""

from align.ppo.config import PPOConfig
from align.ppo.train import run_ppo
from align.ppo.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer", "run_ppo"]
