"""Settings: a YAML file plus `--key value`, read into one dataclass a stage; a wrong key is answered with the nearest."""

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_origin

import yaml
from trl import TrlParser

from align.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
Schedule = Literal["cosine", "linear", "inverse_sqrt", "constant"]
Overlong = Literal["error", "drop", "truncate"]
YAML = "tag:yaml.org,2002:"  # what the tags of YAML's own types begin with


def option(default: Any, help: str) -> Any:
    """A field with its explanation for `--help`: what it is, its unit, where the default comes from."""
    text = help.replace("%", "%%")
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class ModelConfig:
    """Which model, in which number format, trained whole or through LoRA."""

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
        "format that the model computes in; trained weights keep a float32 master. auto: bfloat16 where the hardware "
        "multiplies it, else float32",
    )
    lora_rank: int = option(0, "rank of LoRA adapters; 0 trains all weights (16 is a usual rank)")
    lora_alpha: float = option(32.0, "LoRA scale: updates are multiplied by alpha / rank (LoRA paper, section 4.1)")
    lora_targets: str = option("all-linear", "modules that get an adapter: all-linear, or names joined by commas")
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, about a third more time"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(self, item.name, not isinstance(value, float) or math.isfinite(value), "a finite number")
        require(self, "lora_rank", self.lora_rank >= 0, "0 or more")
        following = getattr(super(), "__post_init__", None)
        if following is not None:  # RunConfig's, in a stage's settings
            following()


@dataclass(kw_only=True)
class EngineConfig:
    """What samples the responses of a rollout; docs/clusters.md says how to start vLLM."""

    engine: Literal["transformers", "vllm-server", "vllm-colocate"] = option(
        "transformers",
        "what samples: transformers with the model in training, a vLLM server on GPUs of its own, or vLLM in the training "
        "processes, on their GPUs",
    )
    vllm_url: str = option("http://localhost:8000", "address of the vLLM server")
    vllm_timeout: float = option(300.0, "seconds to wait for the vLLM server: until it is up, and for each of its answers")
    vllm_memory_share: float = option(0.3, "share of a GPU's memory that vllm-colocate takes (TRL's GRPO: 0.3)")

    def __post_init__(self) -> None:
        require(self, "vllm_url", self.vllm_url.startswith(("http://", "https://")), "an address such as http://host:8000")
        require(self, "vllm_timeout", 0 < self.vllm_timeout <= 1500, "above 0 and at most 1500")
        require(self, "vllm_memory_share", 0 < self.vllm_memory_share < 1, "between 0 and 1")
        following = getattr(super(), "__post_init__", None)
        if following is not None:  # RunConfig's
            following()


@dataclass(kw_only=True)
class RunConfig:
    """Where a run writes, and how its weights are optimised."""

    output_dir: str = option("runs/run", "folder of the run: config, metrics, checkpoints and the final model")
    seed: int = option(0, "seed of all random numbers; the same seed gives the same run")
    resume: bool = option(False, "go on from the last good checkpoint in output_dir")
    log_to: list[str] = option(["tensorboard"], "trackers beside metrics.jsonl: tensorboard, wandb, trackio, none")
    learning_rate: float = option(1e-5, "peak learning rate")
    schedule: Schedule = option("cosine", "decay of the learning rate after warm-up, to 0 at the end (constant: none)")
    warmup: float = option(0.03, "share of all updates in which the learning rate rises from 0")
    optimizer: Literal["adamw", "adafactor"] = option("adamw", "optimiser; adafactor keeps less state (T5 paper)")
    weight_decay: float = option(0.0, "decoupled weight decay of matrices")
    adam_epsilon: float = option(1e-8, "epsilon of AdamW")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm; 0: never")
    micro_batch_tokens: int = option(
        4096,
        "padded tokens that are held in memory for one forward and backward pass; the result does not depend on it",
    )
    memory_limit: float = option(
        0.0,
        "GiB that a process may need by the estimate before the start, on its GPU or in main memory; 0: what is free",
    )
    peak_flops: float = option(
        0.0, "FLOP/s that one device could do at most, for MFU; 0: by the GPU's name in bfloat16, else measured"
    )
    save_every: int = option(0, "updates between checkpoints to resume from; 0: none but the final model")
    skip_bad_rows: bool = option(False, "leave out rows of the data that cannot be read, instead of stopping at the first")
    overlong: Overlong = option("error", "what happens to text beyond the limits: error, drop the record, or truncate")

    def __post_init__(self) -> None:
        require(self, "seed", 0 <= self.seed < 2**32, "0 or more and below 2**32")
        require(self, "learning_rate", self.learning_rate > 0, "above 0")
        require(self, "warmup", 0 <= self.warmup < 1, "at least 0 and below 1")
        require(self, "micro_batch_tokens", self.micro_batch_tokens > 0, "above 0")
        for name in ("save_every", "max_grad_norm", "weight_decay", "adam_epsilon", "memory_limit", "peak_flops"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        unknown = set(self.log_to) - {"tensorboard", "wandb", "trackio", "none"}
        require(self, "log_to", not unknown, "tensorboard, wandb, trackio or none")


def require(config: object, name: str, holds: bool, what: str) -> None:
    """Refuse a value.

    Raises:
        UserError: unless `holds`.
    """
    if not holds:
        raise UserError(f"{name} is {getattr(config, name)!r}, but must be {what}")


class _Parser(TrlParser):
    """TrlParser whose complaints are one line, raised instead of printed with the usage of 40 options."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("argument --", ""))


def parse(config_class: type[Settings], arguments: Sequence[str], program: str | None = None) -> Settings:
    """Read `--config FILE` and `--key value` pairs; the command line wins over the file.

    Args:
        config_class: the stage's dataclass.
        arguments: the command line after the program's name.

    Raises:
        UserError: for a missing or broken file, an unknown key (with the nearest valid one), or a value of a wrong type.
    """
    words, names = list(arguments), [item.name for item in fields(config_class)]
    parser = _Parser(config_class, prog=program, allow_abbrev=False)  # type: ignore[arg-type]
    given: dict[str, list[str]] = {}
    for path in _take_files(words):
        given |= _file_words(path, config_class, parser)
    for word in words:
        name = word.split("=", 1)[0]
        if name.startswith("--") and name != "--help" and name[2:].replace("-", "_") not in names:
            raise UserError(_unknown(f"option {name}", name[2:].replace("-", "_"), names, "--"))
    parser.set_defaults(**{key: [] for key, said in given.items() if not said})  # an empty list: no words can say it
    try:
        (config,) = parser.parse_args_and_config([*chain.from_iterable(given.values()), *_spelled(words)])
    except ValueError as error:  # words that belong to no option
        raise UserError(
            str(error).replace("Some specified arguments are not used by the HfArgumentParser", "unknown words")
        ) from error
    return config


def _take_files(words: list[str]) -> list[Path]:
    """Take `--config FILE` and `--config=FILE` out of the words."""
    found = []
    for at in reversed(range(len(words))):
        name, equals, value = words[at].partition("=")
        if name == "--config":
            if not equals and at + 1 >= len(words):
                raise UserError("--config needs the path of a YAML file")
            found.append(Path(value if equals else words.pop(at + 1)))
            del words[at]
    return found[::-1]


def _spelled(words: Sequence[str]) -> list[str]:
    """Words as argparse reads them: `--a-b` as `--a_b`, and `-1e-5`, which it takes for an option, joined to its option."""
    spelled: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            spelled.append("--" + name[2:].replace("-", "_") + equals + value)
        elif spelled and spelled[-1].startswith("--") and "=" not in spelled[-1] and _is_negative(word):
            spelled[-1] += f"={word}"
        else:
            spelled.append(word)
    return spelled


def _is_negative(word: str) -> bool:
    try:
        return word.startswith("-") and float(word) <= 0
    except ValueError:
        return False


def _unknown(what: str, name: str, names: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"unknown {what}" + (f"; did you mean {prefix}{near[0]}?" if near else "; --help lists the valid names")


def _file_words(path: Path, config_class: type[Settings], parser: _Parser) -> dict[str, list[str]]:
    """The keys of a YAML file as command-line words, so that both are checked and converted alike; none: an empty list.

    Values are taken as they were written: `model: 007` is the text 007, `output_dir: 2024-01-01` no date.
    """
    kinds = {item.name: item.type for item in fields(config_class)}
    words: dict[str, list[str]] = {}
    for name, value in _read_mapping(path).value:
        key, where = str(name.value), f"{path}:{name.start_mark.line + 1}"
        if key not in kinds:
            raise UserError(f"{where}: " + _unknown(f"key '{key}'", key, list(kinds)))
        if key in words:
            raise UserError(f"{where}: key '{key}' is there twice; remove one")
        if isinstance(value, yaml.SequenceNode) and get_origin(kinds[key]) is not list:
            raise UserError(f"{where}: key '{key}': a list where one value belongs")
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(item, yaml.ScalarNode) and item.tag.startswith(YAML) for item in items):
            raise UserError(f"{where}: key '{key}': a nested mapping, a list in a list or a tag is not a value")
        if value.tag == f"{YAML}bool" and kinds[key] is bool:  # YAML knows more words for it (on, off) than the command line
            words[key] = [f"--{key}={yaml.safe_load(value.value)}"]
        elif isinstance(value, yaml.SequenceNode):
            words[key] = [f"--{key}", *(item.value for item in items)] if items else []
        elif value.tag != f"{YAML}null":
            words[key] = [f"--{key}={value.value}"]
    try:
        parser.parse_known_args(list(chain.from_iterable(words.values())))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return words


def _read_mapping(path: Path) -> yaml.MappingNode:
    """The top of a YAML file, in which every value still stands as it was written."""
    try:
        top = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(top, yaml.MappingNode):
        raise UserError(f"{path}: must hold `key: value` lines")
    return top


def dump(config: RunConfig) -> str:
    """The resolved settings as YAML that `--config` reads back."""
    return yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False, allow_unicode=True)
