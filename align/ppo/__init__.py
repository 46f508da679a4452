"""PPO with a KL penalty."""

from align.ppo.config import PPOConfig
from align.ppo.setup import run_ppo

__all__ = ["PPOConfig", "run_ppo"]
