"""Settings: one dataclass per stage, made of groups; each option declares its default, help text and limits.

A group derives from `Settings` and a stage's settings from its groups, side by side. `ModelConfig`, `RunConfig` and
`OptimizationConfig` are the groups of every stage. Classes of groups and commands end in `Config`, those of blocks in
`Settings`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast, get_type_hints

import yaml

from align.core.errors import UserError, without_secrets
from align.core.plugins import import_object
from align.core.setting_names import describe_unknown
from align.core.setting_values import convert

Schedule = Literal["cosine", "linear", "inverse_sqrt", "truncated_rsqrt", "constant"]
Overlong = Literal["error", "drop", "truncate"]
HUB_REPO = re.compile(r"[\w.-]+/[\w.-]+")


Found = TypeVar("Found")


def _once_per_class(function: Callable[[type[Any]], Found]) -> Callable[[type[Any]], Found]:
    """`functools.cache`, which takes no `type[Any]` by its types."""
    return cast(Callable[[type[Any]], Found], cache(function))


class Range(NamedTuple):
    """The valid values of a setting: numbers greater than, at least, less than or at most a bound; texts of a list."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    off: float | None = None
    """A number outside the bounds that is valid too: it switches the setting off."""
    choices: Sequence[str] = ()
    required: bool = False
    """Whether an empty value is refused."""

    def allow(self, value: Any) -> bool:
        """Whether a value, or each item of a list, is within the limits; NaN and infinity never are."""
        if self.required and (value == [] or (isinstance(value, str) and not value.strip())):
            return False
        return all(self._allow_one(item) for item in (value if isinstance(value, list) else [value]))

    def _allow_one(self, value: Any) -> bool:
        if isinstance(value, str):
            return not self.choices or value in self.choices
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if value == self.off:
            return True
        low = (self.gt is None or value > self.gt) and (self.ge is None or value >= self.ge)
        return low and (self.lt is None or value < self.lt) and (self.le is None or value <= self.le)

    def __str__(self) -> str:
        """The valid values in words, for a message."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.required:
            return "given"
        bounds = {"above": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        parts = [f"{word} {bound:,}" for word, bound in bounds.items() if bound is not None]
        if self.ge is not None and len(parts) == 1:
            parts = [f"{self.ge:,} or more"]
        elif self.ge is not None and self.le is not None:
            parts = [f"from {self.ge:,} to {self.le:,}"]
        return (" and ".join(parts) or "a finite number") + ("" if self.off is None else f", or {self.off:,}")


class UnsetFloat(float):
    """A default that another setting switches off; a number that a user gives is a plain `float`."""


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declare a field of a settings dataclass, with its help text and the fields of `Range`.

    A subclass that changes a default inherits the limits.
    """
    text = f"{help} ({', '.join(limits['choices'])})" if "choices" in limits else help
    metadata = {"help": text, "limits": Range(**limits)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def block(settings: str, help: str) -> Any:
    """Declare a field that is a block of settings, "module:Class", which is imported when given; None unless one of them is.

    In YAML a block is a mapping (`ptx: {data: x}`), on the command line its settings are `--ptx.data x`, and in Python it is
    an object of its class or a mapping.
    """
    return field(default=None, metadata={"help": help, "block": settings})


def group(settings: type[Any], help: str) -> Any:
    """Declare a field that is a block of settings with defaults, which is there even if none of them is given."""
    path = f"{settings.__module__}:{settings.__qualname__}"
    return field(default_factory=settings, metadata={"help": help, "block": path})


@dataclass(kw_only=True)
class Settings:
    """Base of all settings: checks type and limits of a value when it is set.

    Paths may be `pathlib.Path` objects, and ~ at the beginning of a text becomes the user's home folder. A single value of a
    list may stand alone. An argument that is no setting is a `UserError` with the name of the setting in its place.
    """

    def __new__(cls, *values: Any, **given: Any) -> Self:
        """Refuse arguments that are no settings, before the dataclass does with a `TypeError` that names no other."""
        _require_names(cls, given)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        if name in (blocks := block_paths(type(self))):
            if value is not None or not hasattr(type(self), name):  # a group has no default value
                value = _as_block(name, value, blocks[name])
        elif name in (declared := declarations(type(self))):
            hint, limits = declared[name]
            value = convert(name, value, hint)
            if value is not None and not limits.allow(value):
                raise UserError(f"{name} is {value!r}, but must be {limits}")
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        """Check settings that depend on each other; a subclass extends this and calls `super()`."""


@_once_per_class
def block_paths(settings: type[Any]) -> dict[str, str]:
    """The blocks of a settings dataclass: the "module:Class" of each by the name of its field."""
    return {item.name: item.metadata["block"] for item in fields(settings) if "block" in item.metadata}


def setting_names(settings: type[Any]) -> list[str]:
    """All settings, those of blocks as `block.name`."""
    names = [item.name for item in fields(settings)]
    for block, path in block_paths(settings).items():
        names += [f"{block}.{item.name}" for item in fields(import_object(path))]
    return names


def _require_names(settings: type[Any], given: Iterable[str], prefix: str = "") -> None:
    """Refuse names that are no settings of a class; `prefix` precedes its names."""
    own = {item.name for item in fields(settings)}
    if unknown := [f"{prefix}{name}" for name in given if name not in own]:
        known = [prefix + name for name in setting_names(settings)]
        listed = f"help({settings.__name__}) lists the valid names"
        raise UserError("; ".join(describe_unknown(f"setting {name}", name, known, "", listed) for name in unknown))


def _as_block(name: str, value: object, path: str) -> object:
    block_class = import_object(path)
    if isinstance(value, block_class):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}, but must be a block of settings")
    _require_names(block_class, value, f"{name}.")
    try:
        return block_class(**value)
    except UserError as error:
        raise UserError(f"{name}.{error}") from error


@_once_per_class
def declarations(settings: type[Any]) -> dict[str, tuple[Any, Range]]:
    """The type and the limits of each setting; of several declarations in base classes the nearest with limits counts."""
    hints, limits = get_type_hints(settings), {item.name: Range() for item in fields(settings)}
    for base in reversed(settings.__mro__):
        for item in base.__dict__.get("__dataclass_fields__", {}).values():
            declared = item.metadata.get("limits", Range())
            limits[item.name] = limits.get(item.name, Range()) if declared == Range() else declared
    return {name: (hints[name], found) for name, found in limits.items()}


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """Which model, in which number format, and whether all its weights are trained or LoRA adapters."""

    help_title = "model"

    model: str = option("smollm2-135m", "initial model: a folder, a hub name or a built-in model (`align model list`)")
    chat_template: str = option(
        "auto",
        "chat template: auto (the tokenizer's, else plain), plain, raw, the name of one of the tokenizer's, or the path of "
        "a Jinja file; auto[enable_thinking=false] sets variables of the template",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "number format of computations; auto: bfloat16 if the hardware supports it, with float32 masters"
    )
    lora_r: int = option(0, "rank of LoRA adapters; 0 trains all weights (16 is a usual rank)", ge=0)
    lora_alpha: float = option(32.0, "LoRA scale: updates are multiplied by alpha / rank (LoRA paper, section 4.1)")
    lora_target_modules: str = option("all-linear", "modules that get an adapter: all-linear, or names separated by commas")
    lora: Any = block("align.models.lora:LoraSettings", "further fields of PEFT's LoraConfig for a new adapter")
    block_attention: bool = option(
        False,
        "on a GPU, read rows of several responses by FlexAttention; decoders only",
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, about a third more time"
    )


@dataclass(kw_only=True)
class OptimizationConfig(Settings):
    """How weights are optimized."""

    help_title = "optimization"

    learning_rate: float = option(1e-5, "peak learning rate", gt=0)
    lr_scheduler_type: Schedule = option(
        "cosine",
        "decay of the learning rate after warm-up: cosine and linear to 0, inverse_sqrt as sqrt(warm-up / update); "
        "truncated_rsqrt (T5) stays at learning_rate during warm-up, then decays as inverse_sqrt",
    )
    warmup_ratio: float = option(0.03, "share of all updates during which the learning rate rises from 0", ge=0, lt=1)
    optimizer: Literal["adamw", "adafactor"] = option("adamw", "optimizer; adafactor needs less memory (T5 paper)")
    weight_decay: float = option(0.0, "decoupled weight decay of matrices", ge=0)
    adam_beta1: float = option(0.9, "decay of AdamW's mean of gradients", ge=0, lt=1)
    adam_beta2: float = option(0.999, "decay of AdamW's mean of squared gradients (InstructGPT: 0.95)", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "epsilon of AdamW", ge=0)
    max_grad_norm: float = option(1.0, "largest global norm of the gradients; 0: no clipping", ge=0)
    micro_batch_tokens: int = option(4096, "padded tokens in one forward and backward pass; does not affect results", gt=0)

    def without_effect(self) -> dict[str, str]:
        """Return the settings that have no effect at the values of others, with the reason."""
        if self.optimizer == "adafactor":
            return dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), "optimizer adafactor")
        return {}

    def without_effect_warning(self) -> str:
        """Return a line with the settings that have no effect and differ from their default, or ""."""
        defaults = {each.name: each.default for each in fields(self)}
        found = [
            f"{name} {getattr(self, name)} ({reason})"
            for name, reason in self.without_effect().items()
            if getattr(self, name) != defaults[name]
        ]
        return f"warning: settings without effect: {', '.join(found)}" if found else ""


@dataclass(kw_only=True)
class RunConfig(Settings):
    """Where a run writes, and how it is saved and resumed."""

    help_title = "output, checkpoints and processes"

    output_dir: str = option("runs/run", "folder of the run: config, metrics, checkpoints and the final model")
    seed: int = option(0, "seed of all random numbers; the same seed gives the same run", ge=0, lt=2**32)
    resume_from_checkpoint: bool | str = option(
        False,
        "auto or true: resume from the last valid checkpoint in output_dir, or start a new run; or the path of a checkpoint",
    )
    dry_run: bool = option(
        False, "load and check everything, print the plan and stop before the first update; nothing is written"
    )
    report_to: list[str] = option(
        ["tensorboard"], "trackers in addition to metrics.jsonl", choices=("tensorboard", "wandb", "trackio", "none")
    )
    save_steps: int = option(0, "updates between checkpoints; 0: by time, see save_minutes", ge=0)
    save_minutes: float = option(
        10.0, "minutes between checkpoints if save_steps is 0; 0: a checkpoint only after a request to stop", ge=0
    )
    save_total_limit: int = option(2, "number of checkpoints that are kept; 0: all", ge=0)
    collective_timeout: float = option(1800.0, "time limit of a collective operation, in seconds", ge=1, le=86_400)
    skip_bad_rows: bool = option(False, "skip bad rows of the data instead of stopping at the first")
    device_watts: float = option(
        0.0, "average power of one process's device and its share of the machine, in watts; 0: unknown", ge=0
    )
    co2e_per_kwh: float = option(0.0, "kg of CO2e per kWh of electricity; needs device_watts; 0: unknown", ge=0)
    price_per_hour: float = option(0.0, "price of one process's device per hour, in any currency; 0: unknown", ge=0)
    push_to_hub: str = option("", "repository on the Hugging Face Hub for the final model: user/name; created as private")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_repo = not self.push_to_hub or HUB_REPO.fullmatch(self.push_to_hub) is not None
        require_setting(self, "push_to_hub", is_repo, "a repository on the hub, as user/name")
        require_setting(self, "output_dir", str(self.output_dir).strip() != "", "a folder, such as runs/mine; . is this one")


@dataclass(kw_only=True)
class MixtureConfig(Settings):
    """How several sources of training data are mixed, see `align.training.data_order.DataOrder`."""

    help_title = "several sources of training data"

    mixing_cap: int = option(
        0, "examples above which a larger source of train_data gets no larger share (T5's K); 0: none", ge=0
    )
    mixing_temperature: float = option(
        1.0, "shares of the sources to the power 1 / this (T5's T): 1 as large as they are, 1000 nearly equal", ge=1
    )
    task_prefixes: list[str] = option(
        [], "a text for each source of train_data that its prompts begin with, such as 'summarize: ' (T5), '' for none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        cut_off = getattr(self, "overlong", "error") == "truncate"  # which keeps the end of a prompt
        require_setting(self, "task_prefixes", not (self.task_prefixes and cut_off), "empty with overlong truncate")


@dataclass(kw_only=True)
class SplitConfig(Settings):
    """Validation data from the training data, see `align.batches.mixtures.split_by_opening`."""

    help_title = "held-out data"

    validation_split: float = option(
        0.0, "share of the training prompts that is held out as validation data, with all of their rows; 0: none", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation_data", "validation_prompts"):
            given = bool(getattr(self, name, ""))
            require_setting(self, "validation_split", not (given and self.validation_split), f"0 with {name}")


@dataclass(kw_only=True)
class SequenceConfig(Settings):
    """Rows that are shared out among processes."""

    help_title = "sequence parallelism"

    sequence_parallel: int = option(
        1, "processes that share each row that is too long for one (DeepSpeed Ulysses); divides a decoder's heads", ge=1
    )


def require_setting(config: object, name: str, valid: bool, expected: str) -> None:
    """Refuse the value of a setting unless it is valid; the message ends with the expected value."""
    if not valid:
        raise UserError(f"{name} is {getattr(config, name)!r}, but must be {expected}")


def dump(config: Settings) -> str:
    """The resolved settings as YAML that `--config` can read again; secrets in addresses of servers are left out."""
    return without_secrets(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False, allow_unicode=True))
