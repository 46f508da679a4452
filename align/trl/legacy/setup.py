"""Arguments of TRL 0.11's trainer: checks, and conversion to this library's settings."""

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

import align.ppo.config as core
from align.trl.config import InvalidArgumentError
from align.trl.legacy.config import PPOConfig
from align.trl.value_head import PreTrainedModelWrapper

INNER_METHODS = (
    *("compute_advantages", "compute_rewards", "loss", "train_minibatch", "record_step_stats", "_kl_penalty"),
    "_step_safety_checker",
)
"""Methods of TRL's trainer that `step` does not call, although overriding them would change the algorithm in TRL."""
COPIED_METHODS = ("batched_forward_pass", "_generate_batched")
"""Methods that subclasses often copy with small changes, and that are never called here."""
NEW_ARGUMENTS = {
    "args": "config",
    "processing_class": "tokenizer",
    "train_dataset": "dataset",
    "reward_model": "call it in the script, and give its scores to step()",
    "value_model": "the value head of `model`",
    "optimizers": "optimizer, lr_scheduler",
    "peft_config": "AutoModelForCausalLMWithValueHead.from_pretrained(name, peft_config=...)",
}
"""Trainer arguments of TRL 0.12 and later."""


class KnownArguments:
    """Rejects arguments of later trainers, and subclasses that override methods that `step` does not call."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if later := [name for name in kwargs if name in NEW_ARGUMENTS and not _takes(cls, name)]:
            places = "; ".join(f"`{name}`: {NEW_ARGUMENTS[name]}" for name in later)
            raise InvalidArgumentError(
                f"align.trl.legacy.PPOTrainer has the arguments of TRL 0.11: {places}. align.trl.PPOTrainer has those of "
                "TRL 0.12 to 1.12"
            )
        if overridden := [name for name in INNER_METHODS if hasattr(cls, name)]:
            raise InvalidArgumentError(
                f"{cls.__name__}.{overridden[0]} would never be called: change scores before step(), or write an extension "
                "of align.ppo (docs/howto/own-extension.md)"
            )
        return super().__new__(cls)


def _takes(trainer: type[Any], name: str) -> bool:
    """Return whether the constructor of a subclass accepts an argument with this name."""
    parameters = inspect.signature(trainer.__init__).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def require_objects(
    config: object, model: object, ref_model: object, tokenizer: object, optimizer: object, lr_scheduler: object
) -> None:
    """Raise InvalidArgumentError for a trainer argument with a wrong type."""
    expected = (
        ("config", config, PPOConfig, "an align.trl.legacy.PPOConfig"),
        ("model", model, PreTrainedModelWrapper, "a model with a value head of align.trl.legacy"),
        ("ref_model", ref_model, PreTrainedModelWrapper | None, "a model with a value head of align.trl.legacy, or None"),
        ("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer"),
    )
    for name, value, kind, wanted in expected:
        if not isinstance(value, kind):
            raise InvalidArgumentError(f"{name} must be {wanted}, got {type(value).__module__}.{type(value).__name__}")
    if ref_model is not None and ref_model is model:
        raise InvalidArgumentError("ref_model is the model itself, which is trained: give a copy, or None")
    if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", None) is not optimizer:
        raise InvalidArgumentError("lr_scheduler belongs to another optimizer: give its optimizer, too")


def core_config(config: PPOConfig) -> core.PPOConfig:
    """Return this library's settings for loading models and for the engine.

    Nothing is written to `output_dir`.
    """
    folder = Path(config.project_kwargs.get("logging_dir") or tempfile.gettempdir()) / f"align-trl-legacy-{os.getpid()}"
    return core.PPOConfig(
        output_dir=str(folder),
        seed=config.seed,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_epsilon=1e-8,
        max_grad_norm=config.max_grad_norm or 0.0,
        gradient_checkpointing=config.gradient_checkpointing,
        report_to=[config.log_with or "none"],
        chat_template="raw",
        critic="shared",
        ignore_eos=True,
    )


def uncalled_methods(trainer: type[Any]) -> list[str]:
    """Return a line for each method of a subclass that TRL's `step` would call and this `step` does not."""
    return [
        f"{trainer.__name__}.{name} is never called: step() computes log-probs, values and responses without padding"
        for name in COPIED_METHODS
        if hasattr(trainer, name)
    ]
