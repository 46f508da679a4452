"""How tests read settings, and see that they are refused."""

import pytest

from align.core.errors import UserError
from align.core.settings_parser import parse
from align.dpo.train import DPOConfig
from align.ppo.config import PPOConfig
from align.reward.train import RewardConfig
from align.sft.train import SFTConfig

STAGES = [SFTConfig, RewardConfig, PPOConfig, DPOConfig]
NEEDED = {PPOConfig: ["--reward_functions", "a:f"]}
"""What a stage cannot do without."""


def read(stage, *words):
    return parse(stage, [*NEEDED.get(stage, []), *words])


def refused(call, *parts):
    """The message of a refusal: one line with all `parts` in it."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message
