"""TRL's `PPOTrainer` and `PPOConfig` on this library: change one import of a script that was written for TRL 1.12."""

from align.trl.config import PPOConfig
from align.trl.trainer import PPOTrainer
from align.trl.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
]
