"""PPO API of TRL 0.4 to 0.11: the script samples and scores responses, and `step` trains on them.

    from align.trl.legacy import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    from align.trl.legacy.core import LengthSampler

docs/migrate-from-trl.md lists the differences. `align.trl` has the API of TRL 0.12 to 1.12.
"""

from align.trl.legacy.config import PPOConfig
from align.trl.legacy.controllers import AdaptiveKLController, FixedKLController
from align.trl.legacy.core import set_seed
from align.trl.legacy.reference import create_reference_model
from align.trl.legacy.trainer import PPOTrainer
from align.trl.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)

__all__ = [
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "FixedKLController",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "create_reference_model",
    "set_seed",
]
