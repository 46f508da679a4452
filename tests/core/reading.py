"""How tests read settings, and see that they are refused."""

from dataclasses import dataclass
from typing import Any, Literal

from align.core.settings import RunConfig, Settings, block, option, require_setting
from align.core.settings_parser import parse
from align.dpo import DPOConfig
from align.ppo.config import PPOConfig
from align.reward import RewardConfig
from align.sft import SFTConfig
from tests.refusals import refusal

STAGES = [SFTConfig, RewardConfig, PPOConfig, DPOConfig]
NEEDED = {PPOConfig: ["--reward_functions", "a:f"]}
"""What a stage cannot do without."""


@dataclass(kw_only=True)
class MixSettings(Settings):
    """A block with a setting of each type."""

    data: str = option("", "a file of texts", required=True)
    coef: float = option(27.8, "the weight of its loss", gt=0)
    kind: Literal["plain", "packed"] = option("plain", "how texts become rows")
    weights: list[str] = option([], "several words")
    shuffled: bool = option(False, "whether the order is random")
    rows: int = option(0, "how many rows are read; 0: all", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "rows", self.kind == "packed" or not self.rows, "0 unless kind is packed")


@dataclass(kw_only=True)
class WithBlock(RunConfig):
    """A stage with a block."""

    mix: Any = block("tests.core.reading:MixSettings", "texts that are mixed in")


@dataclass(kw_only=True)
class WithAbsentBlock(WithBlock):
    """A stage with another block, which cannot be imported."""

    absent: Any = block("tests.core.no_such_module:Absent", "a block whose module does not exist")


def read(stage, *words):
    return parse(stage, [*NEEDED.get(stage, []), *words])


def refused(call, *parts):
    """The message of a refusal: one line with all `parts` in it."""
    message = refusal(call)
    for part in parts:
        assert part in message
    return message
