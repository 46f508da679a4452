"""Settings: one dataclass per stage, made of the groups here; each option has a default and a text for `--help`."""

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from align.core.errors import UserError, without_secrets
from align.core.signals import GRACE_SECONDS

Schedule = Literal["cosine", "linear", "inverse_sqrt", "constant"]
ReadLayers = Literal["last", "last_four", "mix"]
Overlong = Literal["error", "drop", "truncate"]


def option(default: Any, help: str) -> Any:
    """A field of a settings dataclass with its text for `--help`: what it is, its unit, where the default comes from."""
    text = help.replace("%", "%%")
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


TEXTS = ("instruction", "task_prefixes", "scorer_prompt", "fallback")
"""Settings that hold text for a model, in which ~ is a character."""
WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text or a path"}


class Settings:
    """Base of all settings: checks the type of a value when it is set.

    Paths may be `pathlib.Path` objects, and ~ at the beginning of a text becomes the user's home folder. A single value of a
    list may stand alone.
    """

    def __setattr__(self, name: str, value: object) -> None:
        hint = _field_types(type(self)).get(name)  # type: ignore[arg-type]
        super().__setattr__(name, value if hint is None else _converted(name, value, hint))


@cache
def _field_types(settings: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(settings)
    return {item.name: hints[item.name] for item in fields(settings)}


def _converted(name: str, value: object, hint: Any) -> object:
    """A value as the type of its setting.

    Raises:
        UserError: if it has another type, or is none of the words of a `Literal`.
    """
    if get_origin(hint) is list:
        items = list(value) if isinstance(value, list | tuple) else [value]
        return [_converted(name, item, get_args(hint)[0]) for item in items]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{name} is {value!r}, but must be one of {', '.join(map(str, get_args(hint)))}")
        return value
    is_bool = isinstance(value, bool)
    if hint is bool and is_bool:
        return value
    if hint is int and isinstance(value, Integral) and not is_bool:
        return value if isinstance(value, int) else int(value)
    if hint is float and isinstance(value, Real) and not is_bool:
        return value if isinstance(value, int | float) else float(value)
    if hint is str and isinstance(value, str | os.PathLike):
        return _with_home(os.fspath(value)) if name not in TEXTS else value
    if hint in WANTED:
        raise UserError(f"{name} is {value!r} ({type(value).__name__}), but must be {WANTED[hint]}")
    return value


def _with_home(path: str) -> str:
    """A path, alone or after `model:`, with ~ at its beginning expanded."""
    prefix = "model:" if path.startswith("model:~") else ""
    return prefix + os.path.expanduser(path.removeprefix(prefix))


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """Which model, in which number format, and whether all its weights are trained or LoRA adapters."""

    model: str = option(
        "smollm2-135m",
        "model to start from: a folder, a hub name, smollm2-135m, tiny-llama, tiny-gpt2 or tiny-t5",
    )
    chat_template: str = option(
        "auto",
        "how conversations become text: auto (the tokenizer's own template, else plain), plain, raw (text to be "
        "continued), or the path of a Jinja file",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "number format that the model computes in; trained weights keep a float32 master. auto: bfloat16 where the "
        "hardware multiplies it, else float32",
    )
    lora_rank: int = option(0, "rank of LoRA adapters; 0 trains all weights (16 is a usual rank)")
    lora_alpha: float = option(32.0, "LoRA scale: updates are multiplied by alpha / rank (LoRA paper, section 4.1)")
    lora_targets: str = option("all-linear", "modules that get an adapter: all-linear, or names separated by commas")
    prefix_lm: bool = option(
        False,
        "let a decoder's prompt see itself whole while the response stays causal (UniLM; T5's prefix language model); saved "
        "with the model, which then needs no setting",
    )
    block_attention: bool = option(
        False,
        "on a GPU, read rows that several responses share by FlexAttention, which skips what no token sees; decoders only; "
        "it has not run on a GPU yet",
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, about a third more time"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require_setting(self, item.name, not isinstance(value, float) or math.isfinite(value), "a finite number")
        require_setting(self, "lora_rank", self.lora_rank >= 0, "0 or more")
        next_check = getattr(super(), "__post_init__", None)
        if next_check is not None:  # RunConfig's, in a stage's settings
            next_check()


@dataclass(kw_only=True)
class HeadConfig(Settings):
    """Settings of the layers that a head on a model reads."""

    read_layers: ReadLayers = option(
        "last",
        "layers whose states the head reads: last, last_four (joined, as frozen BERT reads best), or mix (all of them in "
        "learned shares, as ELMo's); saved with the model",
    )


@dataclass(kw_only=True)
class RunConfig(Settings):
    """Where a run writes, and how its weights are optimized."""

    output_dir: str = option("runs/run", "folder of the run: config, metrics, checkpoints and the final model")
    seed: int = option(0, "seed of all random numbers; the same seed gives the same run")
    resume: bool = option(
        False, "continue from the last whole checkpoint in output_dir; true and auto start anew where there is none"
    )
    log_to: list[str] = option(["tensorboard"], "trackers in addition to metrics.jsonl: tensorboard, wandb, trackio, none")
    learning_rate: float = option(1e-5, "peak learning rate")
    layer_decay: float = option(
        1.0,
        "rate of a layer as a share of that of the layer above it, and of the last layer as a share of learning_rate, which "
        "is that of heads (ULMFiT: 0.385, that is 1 / 2.6); 1: all the same",
    )
    schedule: Schedule = option("cosine", "decay of the learning rate after warm-up, to 0 at the end (constant: none)")
    warmup: float = option(0.03, "share of all updates during which the learning rate rises from 0")
    optimizer: Literal["adamw", "adafactor"] = option("adamw", "optimizer; adafactor keeps less state (T5 paper)")
    weight_decay: float = option(0.0, "decoupled weight decay of matrices")
    adam_beta1: float = option(0.9, "decay of AdamW's mean of gradients")
    adam_beta2: float = option(0.999, "decay of AdamW's mean of squared gradients (InstructGPT: 0.95, RoBERTa: 0.98)")
    adam_epsilon: float = option(1e-8, "epsilon of AdamW")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm; 0: never")
    micro_batch_tokens: int = option(
        4096,
        "padded tokens in memory for one forward and backward pass; the result does not depend on it",
    )
    memory_limit: float = option(
        0.0,
        "GiB that the estimate before the start allows a process, on its GPU or in main memory; 0: what is free",
    )
    peak_flops: float = option(
        0.0, "peak FLOP/s of one device, for MFU; 0: known for a GPU in bfloat16 by its name, else measured"
    )
    router_loss_weight: float = option(
        0.0,
        "weight of the loss that keeps a mixture's experts evenly used, 1 where they are (Switch Transformers: 0.01)",
    )
    save_every: int = option(
        0, "updates between checkpoints to resume from; 0: none but the final model, and one when asked to stop"
    )
    keep_checkpoints: int = option(
        2,
        "newest checkpoints that are kept, of which an older one serves if the newest is damaged; 0: all",
    )
    checkpoint_in_background: bool = option(
        False,
        "write checkpoints while training goes on, which then waits only until their state is copied (AdamW: 12 bytes of "
        "main memory for each trained weight)",
    )
    lost_after: float = option(
        45.0,
        "seconds without a sign of life from another process's machine after which the run ends with a line that names the "
        "process; 0: only collective_timeout ends it",
    )
    collective_timeout: float = option(
        1800.0, "seconds that a process waits for the others in one exchange before the run ends (gloo's default: 1800)"
    )
    stop_grace: float = option(
        GRACE_SECONDS,
        "seconds that a run may take to save and end after a request to stop, then it ends without saving; set it below the "
        "time after which your cluster kills (align launch gives its processes 5 s more than this)",
    )
    template_date: str = option(
        "",
        "current date of chat templates that write it, as 2026-11-25; empty: the day on which the run starts, which its "
        "config.yaml and the saved chat template keep",
    )
    skip_bad_rows: bool = option(False, "leave out rows of the data that cannot be read instead of stopping at the first")
    overlong: Overlong = option("error", "what happens to text beyond the limits: error, drop the record, or truncate")

    def __post_init__(self) -> None:
        require_setting(self, "seed", 0 <= self.seed < 2**32, "0 or more and below 2**32")
        require_setting(self, "learning_rate", self.learning_rate > 0, "above 0")
        require_setting(self, "layer_decay", 0 < self.layer_decay <= 1, "above 0 and at most 1")
        require_setting(self, "warmup", 0 <= self.warmup < 1, "at least 0 and below 1")
        for name in ("adam_beta1", "adam_beta2"):
            require_setting(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        require_setting(self, "micro_batch_tokens", self.micro_batch_tokens > 0, "above 0")
        counts = ("save_every", "keep_checkpoints")
        weights = ("max_grad_norm", "weight_decay", "adam_epsilon", "router_loss_weight")
        require_setting(self, "template_date", not self.template_date or is_date(self.template_date), "a date as 2026-11-25")
        lost = self.lost_after == 0 or self.lost_after >= 5
        require_setting(self, "lost_after", lost, "0, or 5 or more: the probes that find out take whole seconds")
        require_setting(self, "collective_timeout", 1 <= self.collective_timeout <= 86_400, "1 to 86,400 (a day)")
        require_setting(self, "stop_grace", 1 <= self.stop_grace <= 86_400, "1 to 86,400 (a day)")
        for name in (*counts, *weights, "memory_limit", "peak_flops"):
            require_setting(self, name, getattr(self, name) >= 0, "0 or more")
        unknown = set(self.log_to) - {"tensorboard", "wandb", "trackio", "none"}
        require_setting(self, "log_to", not unknown, "tensorboard, wandb, trackio or none")


@dataclass(kw_only=True)
class MixtureConfig(Settings):
    """How several sources of training data are mixed, see `align.training.epochs.Epochs`."""

    mixing_cap: int = option(
        0, "with several sources of train_data: examples above which a larger source gets no larger share (T5's K); 0: none"
    )
    mixing_temperature: float = option(
        1.0, "their shares to the power 1 / this (T5's T): 1 as large as the sources are, 1000 nearly equal shares"
    )
    task_prefixes: list[str] = option(
        [],
        "a text for each source of train_data that its prompts begin with, such as 'summarize: ' (T5), '' for none; prompts "
        "of other settings are read as they are",
    )

    def __post_init__(self) -> None:
        require_setting(self, "mixing_cap", self.mixing_cap >= 0, "0 or more")
        require_setting(self, "mixing_temperature", self.mixing_temperature >= 1, "1 or more")
        cut_off = getattr(self, "overlong", "error") == "truncate"  # which keeps the end of a prompt
        require_setting(self, "task_prefixes", not (self.task_prefixes and cut_off), "empty with overlong truncate")
        next_check = getattr(super(), "__post_init__", None)
        if next_check is not None:
            next_check()


@dataclass(kw_only=True)
class SequenceConfig(Settings):
    """Rows that are shared out among processes."""

    sequence_parallel: int = option(
        1,
        "processes that share each row: for rows that are too long for one of them (DeepSpeed Ulysses); decoders only, and "
        "a divisor of their heads and of the number of processes",
    )

    def __post_init__(self) -> None:
        require_setting(self, "sequence_parallel", self.sequence_parallel >= 1, "1 or more")
        next_check = getattr(super(), "__post_init__", None)
        if next_check is not None:
            next_check()


def require_setting(config: object, name: str, valid: bool, expected: str) -> None:
    """Refuse the value of a setting unless it is valid.

    Args:
        expected: what the value must be, for the message.

    Raises:
        UserError: if it is not valid.
    """
    if not valid:
        raise UserError(f"{name} is {getattr(config, name)!r}, but must be {expected}")


def is_date(text: str) -> bool:
    """Whether a text is a date in ISO 8601, as 2026-11-25."""
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def dump(config: RunConfig) -> str:
    """The resolved settings as YAML that `--config` can read again; secrets in addresses of servers are left out."""
    return without_secrets(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False, allow_unicode=True))
