"""The class of settings of each stage that trains, by the name of its command."""

from align.attributes import AttributeConfig
from align.core.settings import RunConfig
from align.distill import DistillConfig
from align.dpo import DPOConfig
from align.ppo import PPOConfig
from align.reward import RewardConfig
from align.rules import RuleConfig
from align.sft import SFTConfig

STAGE_CONFIGS: dict[str, type[RunConfig]] = {
    "sft": SFTConfig,
    "reward": RewardConfig,
    "rules": RuleConfig,
    "attributes": AttributeConfig,
    "ppo": PPOConfig,
    "dpo": DPOConfig,
    "distill": DistillConfig,
}
