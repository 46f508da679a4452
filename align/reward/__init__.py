"""Reward modelling."""

from align.reward.config import RewardConfig
from align.reward.trainer import run_reward

__all__ = ["RewardConfig", "run_reward"]
