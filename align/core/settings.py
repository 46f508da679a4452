"""Settings dataclasses: one per stage, composed of groups. Each option declares its default, help text and valid range.

Groups derive from `Settings`; a stage's config inherits from its groups. Every stage uses `ModelConfig`, `RunConfig` and
`OptimizationConfig`. Names of groups and stage configs end in `Config`, names of blocks in `Settings`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast, get_type_hints

import yaml

from align.core.errors import UserError, without_secrets
from align.core.plugins import import_object
from align.core.setting_names import describe_unknown
from align.core.setting_values import convert

Schedule = Literal["cosine", "linear", "inverse_sqrt", "truncated_rsqrt", "constant"]
Overlong = Literal["error", "drop", "truncate"]
HUB_REPO = re.compile(r"[\w.-]+/[\w.-]+")


Result = TypeVar("Result")


def _cache_per_class(function: Callable[[type[Any]], Result]) -> Callable[[type[Any]], Result]:
    """`functools.cache`, typed for functions of a class."""
    return cast(Callable[[type[Any]], Result], cache(function))


class Range(NamedTuple):
    """Valid range of a setting: bounds for numbers, choices for strings."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    off: float | None = None
    """A value outside the bounds that disables the setting."""
    choices: Sequence[str] = ()
    required: bool = False
    """Whether to reject empty values."""

    def allow(self, value: Any) -> bool:
        """Return whether a value, or every item of a list, is valid. NaN and infinity never are."""
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
        """Describe the valid range for an error message."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.required:
            return "set"
        bounds = {"above": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        parts = [f"{word} {bound:,}" for word, bound in bounds.items() if bound is not None]
        if self.ge is not None and len(parts) == 1:
            parts = [f"{self.ge:,} or more"]
        elif self.ge is not None and self.le is not None:
            parts = [f"from {self.ge:,} to {self.le:,}"]
        return (" and ".join(parts) or "a finite number") + ("" if self.off is None else f", or {self.off:,}")


class UnsetFloat(float):
    """A default that another setting disables. Values set by the user are plain `float`."""


def option(default: Any, help: str, *, extension: bool = False, **limits: Any) -> Any:
    """Declare a settings field with its help text and the fields of `Range`.

    A subclass that changes a default inherits the limits. With `extension`, a value that is not falsy switches on the
    extension of that name.
    """
    text = f"{help} Choices: {', '.join(limits['choices'])}." if "choices" in limits else help
    metadata = {"help": text, "limits": Range(**limits), "extension": extension}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def is_extension_setting(item: Field[Any]) -> bool:
    """Return whether a field was declared with `extension`."""
    return bool(item.metadata.get("extension"))


def block(settings: str, help: str, *, extension: bool = False) -> Any:
    """Declare an optional block of settings, given as "module:Class" and imported on first use.

    The field is None unless one of the block's settings is set. In YAML a block is a mapping (`ptx: {data: x}`), on the
    command line its settings are `--ptx.data x`, and in Python it is an instance of its class or a mapping.
    """
    return field(default=None, metadata={"help": help, "block": settings, "extension": extension})


def group(settings: type[Any], help: str) -> Any:
    """Declare a block of settings that always exists, with defaults."""
    path = f"{settings.__module__}:{settings.__qualname__}"
    return field(default_factory=settings, metadata={"help": help, "block": path})


@dataclass(kw_only=True)
class Settings:
    """Base class of all settings. Checks type and range whenever a value is set.

    Paths may be `pathlib.Path` objects. A leading ~ expands to the home folder. A list setting also accepts a single item.
    Unknown arguments raise a `UserError` that suggests the right name.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject unknown arguments before the dataclass raises a `TypeError` without a suggestion."""
        _require_names(cls, kwargs)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        if name in (blocks := block_paths(type(self))):
            if value is not None or not hasattr(type(self), name):  # fields declared by `group` cannot be None
                value = _as_block(name, value, blocks[name])
        elif name in (declared := declarations(type(self))):
            hint, limits = declared[name]
            value = convert(name, value, hint)
            if value is not None and not limits.allow(value):
                raise UserError(f"{name} is {value!r}, but must be {limits}")
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        """Check settings that depend on each other. Subclasses extend this and call `super()`."""


@_cache_per_class
def block_paths(settings: type[Any]) -> dict[str, str]:
    """Map the name of each block field to its "module:Class"."""
    return {item.name: item.metadata["block"] for item in fields(settings) if "block" in item.metadata}


def setting_names(settings: type[Any]) -> list[str]:
    """List all settings. Settings of blocks are listed as `block.name`."""
    names = [item.name for item in fields(settings)]
    for block, path in block_paths(settings).items():
        names += [f"{block}.{item.name}" for item in fields(import_object(path))]
    return names


def _require_names(settings: type[Any], names: Iterable[str], prefix: str = "") -> None:
    """Reject names that are not settings of a class. `prefix` is prepended to the names in the message."""
    field_names = {item.name for item in fields(settings)}
    if unknown := [f"{prefix}{name}" for name in names if name not in field_names]:
        known = [prefix + name for name in setting_names(settings)]
        hint = f"see help({settings.__name__}) for valid names"
        raise UserError("; ".join(describe_unknown(f"setting {name}", name, known, "", hint) for name in unknown))


def _as_block(name: str, value: object, path: str) -> object:
    block_class = import_object(path)
    if isinstance(value, block_class):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}, but must be a mapping of settings")
    _require_names(block_class, value, f"{name}.")
    try:
        return block_class(**value)
    except UserError as error:
        raise UserError(f"{name}.{error}") from error


@_cache_per_class
def declarations(settings: type[Any]) -> dict[str, tuple[Any, Range]]:
    """Map each setting to its type and range. A subclass that overrides a default inherits the range."""
    hints, limits = get_type_hints(settings), {item.name: Range() for item in fields(settings)}
    for base in reversed(settings.__mro__):
        for item in base.__dict__.get("__dataclass_fields__", {}).values():
            declared = item.metadata.get("limits", Range())
            limits[item.name] = limits.get(item.name, Range()) if declared == Range() else declared
    return {name: (hints[name], valid) for name, valid in limits.items()}


@dataclass(kw_only=True)
class QuantizationConfig(Settings):
    """4-bit and 8-bit weights by bitsandbytes."""

    help_title = "quantization"

    load_in_4bit: bool = option(
        False, "Load linear layers in 4 bits (QLoRA). Training requires lora_r. Install the extra quant."
    )
    load_in_8bit: bool = option(False, "Load linear layers in 8 bits. Training requires lora_r. Install the extra quant.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "Data type of load_in_4bit.")
    bnb_4bit_use_double_quant: bool = option(True, "Quantize the block scales of load_in_4bit as well.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "load_in_8bit", not (self.load_in_4bit and self.load_in_8bit), "false with load_in_4bit")

    @property
    def quantization(self) -> str:
        """Quantization format, see `align.models.quantization`; "" without quantization."""
        if self.load_in_4bit:
            return self.bnb_4bit_quant_type + "-double" * self.bnb_4bit_use_double_quant
        return "int8" if self.load_in_8bit else ""


@dataclass(kw_only=True)
class ModelConfig(QuantizationConfig):
    """Model, dtype, quantization and LoRA."""

    help_title = "model"

    model: str = option(
        "smollm2-135m", "Initial model: local folder, Hub id or built-in model (listed by `align model list`)."
    )
    chat_template: str = option(
        "auto",
        "Chat template. auto uses the tokenizer's, or plain if it has none. Also: plain, raw, the name of one of "
        "the tokenizer's templates, or the path of a Jinja file. Set template variables in brackets: "
        "auto[enable_thinking=false].",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Compute dtype. auto selects bfloat16 with float32 master weights if the hardware supports it, else float32."
    )
    lora_r: int = option(0, "LoRA rank (16 is common), or 0 to train all weights.", ge=0)
    lora_alpha: float = option(32.0, "LoRA alpha. Updates are scaled by lora_alpha / lora_r.")
    lora_target_modules: str = option(
        "all-linear", "Modules to adapt: all-linear, or a comma-separated list of module names."
    )
    lora: Any = block("align.models.lora:LoraSettings", "Further options of PEFT's LoraConfig.")
    block_attention: bool = option(
        False,
        "Use FlexAttention for sequences that pack several responses. Requires a GPU and a decoder-only model.",
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass. Uses less memory and about a third more time."
    )


@dataclass(kw_only=True)
class OptimizationConfig(Settings):
    """Optimizer and learning rate schedule."""

    help_title = "optimization"

    learning_rate: float = option(1e-5, "Peak learning rate.", gt=0)
    lr_scheduler_type: Schedule = option(
        "cosine",
        "Learning rate schedule after warmup. cosine and linear decay to 0. inverse_sqrt decays as sqrt(warmup / "
        "update). truncated_rsqrt (T5) holds the peak during warmup and then decays like inverse_sqrt.",
    )
    warmup_ratio: float = option(0.03, "Fraction of all updates used for linear warmup from 0.", ge=0, lt=1)
    optimizer: Literal["adamw", "adafactor", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"] = option(
        "adamw",
        "Optimizer. adafactor (T5) needs less memory, as do the 8-bit ones of the extra quant. States of paged ones move to "
        "the host when a GPU is full. lion_8bit (Lion, arXiv 2302.06675) needs a 3 to 10 times lower learning rate.",
    )
    weight_decay: float = option(0.0, "Decoupled weight decay, applied to matrices only.", ge=0)
    adam_beta1: float = option(0.9, "AdamW beta1.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "AdamW beta2 (InstructGPT: 0.95).", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "AdamW epsilon.", ge=0)
    max_grad_norm: float = option(1.0, "Maximum gradient norm for clipping. 0 disables clipping.", ge=0)
    micro_batch_tokens: int = option(
        4096,
        "Maximum tokens, including padding, per forward and backward pass. Changes memory and speed, not results.",
        gt=0,
    )

    def without_effect(self) -> dict[str, str]:
        """Map each setting that is ignored under the other settings to the reason."""
        if self.optimizer in ("adafactor", "lion_8bit"):
            return dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), f"optimizer {self.optimizer}")
        return {}

    def without_effect_warning(self) -> str:
        """Return a warning that lists ignored settings changed from their default, or ""."""
        defaults = {item.name: item.default for item in fields(self)}
        ignored = [
            f"{name}={getattr(self, name)} ({reason})"
            for name, reason in self.without_effect().items()
            if getattr(self, name) != defaults[name]
        ]
        return f"warning: ignored settings: {', '.join(ignored)}" if ignored else ""


@dataclass(kw_only=True)
class RunConfig(Settings):
    """Output folder, checkpoints, resuming and trackers."""

    length_setting: ClassVar[str] = "num_train_epochs"
    """The setting that determines the number of updates of a run."""
    help_title = "output and checkpoints"

    output_dir: str = option("runs/run", "Output folder for the config, metrics, checkpoints and final model.")
    seed: int = option(0, "Random seed. A run with the same seed is reproducible.", ge=0, lt=2**32)
    resume_from_checkpoint: bool | str = option(
        False,
        "auto (or true) resumes from the latest valid checkpoint in output_dir, or starts a new run if there is "
        "none. Also accepts the path of a checkpoint.",
    )
    dry_run: bool = option(
        False, "Load and check everything, print the plan and exit before the first update. Writes nothing."
    )
    report_to: list[str] = option(
        ["tensorboard"],
        "Trackers to log to, in addition to metrics.jsonl.",
        choices=("tensorboard", "wandb", "trackio", "none"),
    )
    save_steps: int = option(0, "Number of updates between checkpoints. 0 saves by time instead, see save_minutes.", ge=0)
    save_minutes: float = option(
        10.0, "Minutes between checkpoints when save_steps is 0. 0 saves only when the run is asked to stop.", ge=0
    )
    save_total_limit: int = option(2, "Maximum number of checkpoints to keep. 0 keeps all.", ge=0)
    collective_timeout: float = option(1800.0, "Timeout of collective operations, in seconds.", ge=1, le=86_400)
    skip_bad_rows: bool = option(False, "Skip and count invalid data rows instead of stopping at the first.")
    device_watts: float = option(
        0.0, "Average power draw per process (device plus its share of the host), in watts. 0 if unknown.", ge=0
    )
    co2e_per_kwh: float = option(
        0.0, "Carbon intensity of the electricity, in kg CO2e per kWh. Requires device_watts. 0 if unknown.", ge=0
    )
    price_per_hour: float = option(0.0, "Price of one process's device per hour, in any currency. 0 if unknown.", ge=0)
    push_to_hub: str = option("", "Hub repository (user/name) to push the final model to. New repositories are private.")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_repo = not self.push_to_hub or HUB_REPO.fullmatch(self.push_to_hub) is not None
        require_setting(self, "push_to_hub", is_repo, "a Hub repository (user/name)")
        require_setting(self, "output_dir", str(self.output_dir).strip() != "", "a folder, such as runs/mine")


@dataclass(kw_only=True)
class MixtureConfig(Settings):
    """Mixing of several data sources, see `align.training.data_order.DataOrder`."""

    help_title = "data mixing"

    mixing_cap: int = option(0, "Cap on a source's size when computing mixing weights (T5's K). 0 for no cap.", ge=0)
    mixing_temperature: float = option(
        1.0,
        "Mixing temperature T (T5). Sources are weighted in proportion to n^(1/T): 1 is proportional to size, "
        "large values are nearly uniform.",
        ge=1,
    )
    task_prefixes: list[str] = option(
        [], "Prompt prefix for each source of train_data, such as 'summarize: ' (T5). Use '' for no prefix."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        truncates = getattr(self, "overlong", "error") == "truncate"  # truncation removes the beginning, and so the prefix
        require_setting(self, "task_prefixes", not (self.task_prefixes and truncates), "empty with overlong truncate")


@dataclass(kw_only=True)
class SplitConfig(Settings):
    """Validation split of the training data, see `align.batches.mixtures.split_by_opening`."""

    help_title = "validation split"

    validation_split: float = option(
        0.0, "Fraction of training prompts to hold out for validation, with all rows of each. 0 for none.", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation_data", "validation_prompts"):
            is_set = bool(getattr(self, name, ""))
            require_setting(self, "validation_split", not (is_set and self.validation_split), f"0 with {name}")


def require_setting(config: object, name: str, valid: bool, expected: str) -> None:
    """Raise a UserError unless the setting is valid. `expected` ends the message."""
    if not valid:
        raise UserError(f"{name} is {getattr(config, name)!r}, but must be {expected}")


def dump(config: Settings) -> str:
    """Return the resolved settings as YAML for `--config`. Secrets in server URLs are masked."""
    return without_secrets(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False, allow_unicode=True))
