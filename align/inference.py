"""Settings of every command that reads or samples with a finished model; `align sample` and `align eval` share them."""

from dataclasses import dataclass
from typing import Literal

from align.config import Overlong, option, require
from align.generation import Sampling


@dataclass(kw_only=True)
class InferenceConfig:
    """How models are loaded and rows are read."""

    seed: int = option(0, "seed of all random numbers; the same seed gives the same results")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "format that models compute in; auto: bfloat16 where the hardware multiplies it, else float32"
    )
    batch_tokens: int = option(16384, "padded prompt and response tokens held in memory at once; no result depends on it")
    chat_template: str = option("auto", "how conversations become text: auto, plain, raw, or the path of a Jinja file")
    skip_bad_rows: bool = option(False, "leave out rows that cannot be read, instead of stopping at the first")

    def __post_init__(self) -> None:
        require(self, "seed", 0 <= self.seed < 2**32, "0 or more and below 2**32")
        require(self, "batch_tokens", self.batch_tokens > 0, "above 0")


@dataclass(kw_only=True)
class AnsweringConfig(InferenceConfig):
    """How responses to prompts are drawn."""

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
        for name in ("temperature", "top_k"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1")

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn, as `sample` takes it."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.batch_tokens)
