"""Drop-in replacements for the `PPOTrainer` and `PPOConfig` of TRL 1.12. Scripts only need a different import."""

from typing import Any

from align.trl.config import LEGACY, LEGACY_NAMES, PPOConfig
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


def __getattr__(name: str) -> Any:
    """Explain where to find trainers and settings that this module lacks. `from align.trl import NAME` shows the message."""
    if name.startswith("PPOv2"):
        raise ImportError(f"align.trl has no {name}: it is {name.replace('PPOv2', 'PPO')} since TRL 0.12")
    if name in LEGACY_NAMES:
        raise ImportError(f"align.trl has no {name}, which belongs to {LEGACY}")
    if name.endswith(("Trainer", "Config")):
        raise ImportError(f"align.trl has no {name}: import it from trl, whose PPO alone is replaced here")
    raise AttributeError(f"module 'align.trl' has no attribute {name!r}")
