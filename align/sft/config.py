"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from align.core.settings import (
    MixtureConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SequenceConfig,
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
    SequenceConfig,
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
        "demonstrations to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT; FILE[FIELD=COLUMN, ...] reads columns as fields",
    )
    validation_data: str = option("", "held-out demonstrations or texts, which select the best model; empty: none")
    objective: Literal["demonstrations", "lm", "span_corruption", "infilling", "prefix"] = option(
        "demonstrations",
        "training target: the answers of demonstrations; or of raw texts the next token (lm), T5's masked spans "
        "(span_corruption), BART's text with masked spans (infilling), or the continuation of a random prefix (prefix)",
    )
    text_tokens: int = option(512, "length in tokens of the pieces into which raw texts are cut", gt=1)
    num_train_epochs: int = option(1, "passes over the training data (InstructGPT: 16)")
    batch_size: int = option(32, "examples in one update, over all processes")
    prompt_loss_weight: float = option(
        0.0,
        "weight of a language-model loss on the prompt, added to the loss on the response (GPT-1, section 3.2: 0.5)",
        ge=0,
    )
    max_response_tokens: int = option(1024, "longest response, in tokens; in a conversation all turns after the first")
    prefix_lm: bool = option(
        False,
        "attend to a decoder's whole prompt in both directions (T5's prefix language model); saved with the model",
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
