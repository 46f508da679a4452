"""Reward modeling."""

from align.reward.train import RewardConfig, RewardTrainer, run_reward

__all__ = ["RewardConfig", "RewardTrainer", "run_reward"]
