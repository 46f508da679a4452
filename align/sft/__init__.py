"""Supervised fine-tuning."""

from align.sft.config import SFTConfig
from align.sft.train import SFTTrainer, run_sft

__all__ = ["SFTConfig", "SFTTrainer", "run_sft"]
