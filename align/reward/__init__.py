"""Reward modeling."""

from align.reward.config import RewardConfig
from align.reward.train import RewardTrainer, run_reward

__all__ = ["RewardConfig", "RewardTrainer", "run_reward"]
