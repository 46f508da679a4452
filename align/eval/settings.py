"""What every evaluation asks for; each task adds its own settings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from align.config import option, require
from align.inference import AnsweringConfig, InferenceConfig

Item = TypeVar("Item")


@dataclass(kw_only=True)
class EvalConfig(InferenceConfig):
    """Which models are evaluated, and where the results go."""

    models: list[str] = option(
        [], "models to evaluate, side by side: folders, LoRA adapters, run folders, hub names or built-in models"
    )
    output: str = option("runs/eval", "folder of the results; what is in it already is not computed again")
    resamples: int = option(2000, "bootstrap resamples behind each 95 % interval")
    table: bool = option(True, "print the figures as a table; they are in the files in any case")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "output", bool(self.output), "given")
        require(self, "resamples", self.resamples >= 100, "100 or more")
        require(self, "models", len(set(self.models)) == len(self.models), "a list without repetitions")

    def deciding(self, *leave_out: str) -> dict[str, Any]:
        """The settings that decide the result of a single item: the key under which it is kept.

        Args:
            leave_out: further settings of a task that decide nothing about an item.
        """
        free = {"models", "output", "resamples", "batch_tokens", "skip_bad_rows", "table", *leave_out}
        return {name: value for name, value in asdict(self).items() if name not in free}


@dataclass(kw_only=True)
class AnswerConfig(AnsweringConfig, EvalConfig):
    """For tasks that let the models answer prompts."""

    prompts: str = option("data/prompts_heldout.jsonl", "prompts that the models answer: file, folder or hub name")
    limit: int = option(0, "take only so many prompts, at equal distances in the file; 0: all")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "limit", self.limit >= 0, "0 or more")


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """`limit` of the items at equal distances, so that every part of the file is among them; all for 0."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]
