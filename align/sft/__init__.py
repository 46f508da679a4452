"""Supervised fine-tuning."""

from align.sft.train import SFTConfig, SFTTrainer, run_sft

__all__ = ["SFTConfig", "SFTTrainer", "run_sft"]
