"""Optional parts of PPO, one file each. `Extension` is the base class of your own."""

from align.ppo.extensions.extension import Extension, OptimizerStep, PolicyEvaluation, TrainingContext
from align.ppo.records import Experience, RoleOutputs, Rollout, TrainingSignal

__all__ = [
    "Experience",
    "Extension",
    "OptimizerStep",
    "PolicyEvaluation",
    "RoleOutputs",
    "Rollout",
    "TrainingContext",
    "TrainingSignal",
]
