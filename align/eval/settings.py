"""What every evaluation asks for; each task adds its own settings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from align.config import Overlong, option, require
from align.generation import Sampling

Item = TypeVar("Item")


@dataclass(kw_only=True)
class EvalConfig:
    """Which models are evaluated, and where the results go."""

    models: list[str] = option(
        [], "models to evaluate, side by side: folders, LoRA adapters, run folders, hub names or built-in models"
    )
    output: str = option("runs/eval", "folder of the results; what is in it already is not computed again")
    seed: int = option(0, "seed of all random numbers; the same seed gives the same results")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "format that the models compute in; auto: bfloat16 where the hardware multiplies it, else float32"
    )
    batch_tokens: int = option(16384, "padded prompt and response tokens held in memory at once; no result depends on it")
    chat_template: str = option("auto", "how conversations become text: auto, plain, raw, or the path of a Jinja file")
    skip_bad_rows: bool = option(False, "leave out rows that cannot be read, instead of stopping at the first")
    resamples: int = option(2000, "bootstrap resamples behind each 95 % interval")
    table: bool = option(True, "print the figures as a table; they are in the files in any case")

    def __post_init__(self) -> None:
        require(self, "output", bool(self.output), "given")
        require(self, "batch_tokens", self.batch_tokens > 0, "above 0")
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
class AnswerConfig(EvalConfig):
    """For tasks that let the models answer prompts."""

    prompts: str = option("data/prompts_heldout.jsonl", "prompts that the models answer: file, folder or hub name")
    limit: int = option(0, "take only so many prompts, at equal distances in the file; 0: all")
    max_new_tokens: int = option(256, "longest response, in tokens")
    max_prompt_tokens: int = option(1024, "longest prompt, in tokens")
    overlong: Overlong = option("error", "what happens to a longer prompt: error, drop it, or truncate its beginning")
    temperature: float = option(1.0, "divides the logits; 0 takes the likeliest token")
    top_k: int = option(0, "draw from the k likeliest tokens; 0: from all")
    top_p: float = option(1.0, "draw from the likeliest tokens that hold this share of the probability; 1: from all")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "max_prompt_tokens"):
            require(self, name, getattr(self, name) > 0, "above 0")
        for name in ("limit", "temperature", "top_k"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1")

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.batch_tokens)


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """`limit` of the items at equal distances, so that every part of the file is among them; all for 0."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]
