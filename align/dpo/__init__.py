"""Direct preference optimization."""

from align.dpo.train import DPOConfig, DPOTrainer, run_dpo

__all__ = ["DPOConfig", "DPOTrainer", "run_dpo"]
