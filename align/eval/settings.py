"""What every evaluation asks for; each task adds its own settings."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from align.config import option, require


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
        free = {"models", "output", "resamples", "batch_tokens", "skip_bad_rows", *leave_out}
        return {name: value for name, value in asdict(self).items() if name not in free}
