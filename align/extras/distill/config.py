"""Settings of distillation."""

from dataclasses import dataclass
from typing import Literal

from align.core.settings import MixtureConfig, option, require_setting
from align.training.data_order import EpochConfig


@dataclass(kw_only=True)
class DistillConfig(MixtureConfig, EpochConfig):
    """A student that learns from a teacher's predictions, by default as DistilBERT did (Sanh et al. 2019)."""

    model: str = option("smollm2-135m", "the teacher: a folder, a LoRA adapter, a hub name or a built-in model")
    student: str = option("", "model to start the student from, with the teacher's tokenizer; empty: layers of the teacher")
    keep_every_nth_layer: int = option(
        2,
        "without a student: it has the teacher's first layer and every keep_every_nth_layer-th after it (DistilBERT: 2)",
        ge=2,
    )
    learning_rate: float = option(1e-4, "peak learning rate")
    train_data: str = option(
        "data/demonstrations.jsonl",
        "demonstrations; prompts are enough where all responses are sampled: file, folder or hub name; several are "
        "separated by commas, each as NAME or NAME=WEIGHT",
    )
    validation_data: str = option("", "demonstrations to choose the best student by; empty: none")
    responses: Literal["data", "teacher"] = option(
        "data",
        "learn from the responses in the data (data), or from new ones that the teacher writes in each update (teacher)",
    )
    on_policy_fraction: float = option(
        0.0,
        "share of examples whose response the student writes itself in each update (on-policy; lambda of GKD, Agarwal et "
        "al. 2023)",
        ge=0,
        le=1,
    )
    batch_size: int = option(32, "examples in one update, over all processes")
    max_response_tokens: int = option(256, "longest response, in tokens; also of those that are written")
    temperature: float = option(2.0, "divides the logits of teacher and student in the cross-entropy (DistilBERT: 2)", gt=0)
    ce_weight: float = option(
        5.0, "weight of the cross-entropy with the teacher's distribution, times temperature squared (DistilBERT: 5)", ge=0
    )
    lm_weight: float = option(
        2.0, "weight of the language-model loss on responses that the student did not write (DistilBERT: 2)", ge=0
    )
    cosine_weight: float = option(
        1.0, "weight of 1 - the cosine between the last hidden states of student and teacher (DistilBERT: 1)", ge=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "lora_r", self.lora_r == 0, "0: all weights of a student are trained")
        weights = ("ce_weight", "lm_weight", "cosine_weight")
        require_setting(self, "ce_weight", any(getattr(self, name) for name in weights), "above 0 unless another weight is")

    @property
    def all_written(self) -> bool:
        """Whether every response is written in training; prompts are enough then."""
        return self.responses == "teacher" or self.on_policy_fraction == 1
