"""Direct preference optimization."""

from align.dpo.config import DPOConfig
from align.dpo.train import DPOTrainer, run_dpo

__all__ = ["DPOConfig", "DPOTrainer", "run_dpo"]
