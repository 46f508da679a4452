"""Supervised fine-tuning."""

from align.sft.config import SFTConfig
from align.sft.trainer import run_sft

__all__ = ["SFTConfig", "run_sft"]
