"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from align.core.settings import (
    MixtureConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SplitConfig,
    option,
    require_setting,
)
from align.training.data_order import EpochConfig
from align.training.layerwise import LayerwiseConfig


@dataclass(kw_only=True)
class SFTConfig(
    MixtureConfig,
    SplitConfig,
    EpochConfig,
    ModelConfig,
    RunConfig,
    LayerwiseConfig,
    OptimizationConfig,
):
    """Supervised fine-tuning on demonstrations."""

    needs = "a model and demonstrations (train_data)"
    first_run = "configs/sft/tiny-llama.yaml"

    train_data: str = option(
        "data/demonstrations.jsonl",
        "Training demonstrations: file, folder or Hub id. Separate several by commas, each NAME or NAME=WEIGHT. "
        "Use FILE[FIELD=COLUMN, ...] to rename columns.",
    )
    validation_data: str = option("", "Held-out demonstrations or texts, used to select the best model.")
    objective: Literal["demonstrations", "lm", "span_corruption", "infilling", "prefix"] = option(
        "demonstrations",
        "Training objective. demonstrations: assistant turns. On raw text, lm: next token; span_corruption: T5's "
        "masked spans; infilling: BART's masked text; prefix: continuation of a random prefix.",
    )
    text_tokens: int = option(512, "Block size for raw text, in tokens.", gt=1)
    num_train_epochs: int = option(1, "Number of training epochs (InstructGPT: 16).")
    batch_size: int = option(32, "Examples per update, over all processes.")
    prompt_loss_weight: float = option(
        0.0,
        "Weight of the language-model loss on the prompt (GPT-1, section 3.2: 0.5).",
        ge=0,
    )
    max_response_tokens: int = option(
        1024, "Maximum response length, in tokens. In a conversation, of all turns after the first."
    )
    prefix_lm: bool = option(
        False,
        "Use bidirectional attention over a decoder's prompt (T5's prefix LM). Saved with the model.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_text = self.objective != "demonstrations"
        for name, wanted in (("prompt_loss_weight", "0"), ("task_prefixes", "empty")):
            require_setting(self, name, not (is_text and getattr(self, name)), f"{wanted} with objective {self.objective}")

    def without_effect(self) -> dict[str, str]:
        if self.objective == "demonstrations":
            names: tuple[str, ...] = ("text_tokens",)
        else:
            names = ("max_prompt_tokens", "max_response_tokens", "overlong")
        return super().without_effect() | dict.fromkeys(names, f"objective {self.objective}")
