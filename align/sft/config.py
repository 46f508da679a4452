"""Settings of supervised fine-tuning."""

from dataclasses import dataclass

from align.core.settings import MixtureConfig, SequenceConfig, SplitConfig, option, require_setting
from align.training.data_order import EpochConfig


@dataclass(kw_only=True)
class SFTConfig(MixtureConfig, SplitConfig, SequenceConfig, EpochConfig):
    """Supervised fine-tuning on demonstrations."""

    train_data: str = option(
        "data/demonstrations.jsonl",
        "demonstrations to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT; FILE[FIELD=COLUMN, ...] reads columns as fields",
    )
    validation_data: str = option("", "held-out demonstrations, which select the best model; empty: none")
    num_train_epochs: int = option(1, "passes over the training data (InstructGPT: 16)")
    batch_size: int = option(32, "examples in one update, over all processes")
    prompt_loss_weight: float = option(
        0.0,
        "weight of a language-model loss on the prompt, added to the loss on the response (GPT-1, section 3.2: 0.5)",
        ge=0,
    )
    max_response_tokens: int = option(1024, "longest response, in tokens; in a conversation all turns after the first")
    stream_updates: int = option(
        0,
        "number of updates, with streamed train_data, for data larger than memory; 0: read all data before training, for "
        "`num_train_epochs` passes",
        ge=0,
    )
    stream_block: int = option(2000, "with stream_updates: rows of each source in memory at a time, shuffled", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_updates:
            defaults = {"mixing_cap": 0, "mixing_temperature": 1, "num_train_epochs": 1, "validation_split": 0}
            for name, default in defaults.items():
                wanted = f"{default} with stream_updates"
                require_setting(self, name, getattr(self, name) == default, wanted)
