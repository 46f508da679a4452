"""Parse a YAML file and `--key value` arguments into settings, and format `--help`."""

import re
import shutil
import sys
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from inspect import get_annotations
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from align.core.errors import UserError
from align.core.files import resolve_path
from align.core.plugins import import_object
from align.core.setting_names import describe_unknown
from align.core.setting_values import is_optional
from align.core.settings import block_paths, setting_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
HELP_ALL = "see --help-all for valid names"
SHORT_OPTION = re.compile(r"-[^\d.\s]\S*")  # not supported; excludes numbers such as -1e-5
YAML_TAG = "tag:yaml.org,2002:"  # tag prefix of YAML's built-in types


TRUE, FALSE = ("true", "yes", "on", "y", "t", "1"), ("false", "no", "off", "n", "f", "0")


def parse(config_class: type[Settings], arguments: Sequence[str], program: str | None = None) -> Settings:
    """Read `--config FILE` and `--key value` pairs; the command line overrides the file.

    `program` is the program name in `--help`, which prints the settings and exits.

    Raises:
        UserError: if the file is missing or invalid, a key is unknown (the message suggests the nearest valid one), or a
            value has the wrong type.
    """
    # Option names may contain hyphens instead of underscores.
    words = [re.sub("^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in arguments]
    if help_options := {"-h", "--help", "--help_all"} & set(words):
        print(help_text(config_class, program or Path(sys.argv[0]).name, "--help_all" in help_options))
        raise SystemExit(0)
    files = [(path, _read_mapping(path)) for path in _take_config_files(words)]
    names = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    blocks = _used_blocks(config_class, names, [file for _, file in files])
    types = _types_of(config_class)
    for name in blocks:
        types |= _types_of(import_object(block_paths(config_class)[name]), f"{name}.")
    parsed: dict[str, Any] = {}
    for path, file in files:
        parsed |= _file_values(path, file, config_class, types)
    if unknown := [_unknown_option(name, config_class) for name in names if name not in types]:
        raise UserError("; ".join(unknown))
    parsed |= _word_values(words, types)
    values: dict[str, Any] = {name: {} for name in blocks}
    for name, value in parsed.items():
        block, _, inner = name.partition(".")
        if inner:
            values[block][inner] = value
        else:
            values[name] = value
    return config_class(**values)


def _types_of(config_class: type[Any], prefix: str = "") -> dict[str, Any]:
    """Map each setting to its type, blocks excluded."""
    hints, blocks = get_type_hints(config_class), block_paths(config_class)
    return {prefix + item.name: hints[item.name] for item in fields(config_class) if item.name not in blocks}


def _word_values(words: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
    """Parse `--name value`, `--name=value` and, for lists, `--name value value`. The last occurrence of a name wins."""
    options: list[tuple[str, list[str]]] = []
    expects_value = False
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            options.append((name, [text] if equals else []))
            expects_value = not equals
        elif expects_value and not SHORT_OPTION.fullmatch(word):
            name, texts = options[-1]
            texts.append(word)
            expects_value = get_origin(types[name]) is list
        else:
            raise UserError(_unexpected_word(word, options[-1][0] if options else ""))
    return {name: _value_of(name, types[name], texts) for name, texts in options}


def _value_of(name: str, hint: Any, texts: Sequence[str]) -> Any:
    """Convert the strings of a setting to its type. Raise a UserError that starts with the setting's name."""
    if not texts and hint in (bool, bool | str):
        return True
    is_list = get_origin(hint) is list
    if not texts:
        raise UserError(f"--{name} needs {'at least one value' if is_list else 'a value'}")
    values = [_read_text(name, get_args(hint)[0] if is_list else hint, text) for text in texts]
    return values if is_list else values[0]


def _read_text(name: str, hint: Any, text: str) -> Any:
    if is_optional(hint):
        return None if text.lower() in ("none", "null") else _read_text(name, get_args(hint)[0], text)
    if get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in get_args(hint)}
        if text not in choices:
            raise UserError(f"{name}: invalid choice: {text!r} (choose from {', '.join(map(repr, choices.values()))})")
        return choices[text]
    if hint is bool and text.lower() not in TRUE + FALSE:
        raise UserError(f"{name}: must be true or false, not {text!r}")
    if hint in (bool, bool | str):
        return text.lower() in TRUE if hint is bool else text
    try:
        return hint(text)
    except ValueError as error:
        raise UserError(f"{name}: invalid {hint.__name__} value: {text!r}") from error


def _used_blocks(config_class: type[Any], names: Sequence[str], files: Sequence[yaml.MappingNode]) -> list[str]:
    keys = [(str(key.value), value) for file in files for key, value in file.value]
    used = {key for key, value in keys if isinstance(value, yaml.MappingNode)}
    used |= {name.partition(".")[0] for name in (*names, *(key for key, _ in keys)) if "." in name}
    return [name for name in block_paths(config_class) if name in used]


def _unknown_option(name: str, config_class: type[Any]) -> str:
    """Return the message for an unknown option, or for one that names a block."""
    known = setting_names(config_class)
    if name in block_paths(config_class):
        inner = [f"--{other}" for other in known if other.startswith(f"{name}.")]
        return f"--{name} is a block of settings: use {', '.join(inner)}"
    return describe_unknown(f"option --{name}", name, known, "--", HELP_ALL)


def _unexpected_word(word: str, option: str) -> str:
    """Return the message for a word that belongs to no option. It names the option before the word."""
    place = f" after --{option}, which takes one value" if option else ""
    return f"unexpected argument {word!r}{place}; pass settings as --name value"


def _take_config_files(words: list[str]) -> list[Path]:
    """Remove `--config FILE` and `--config=FILE` from the words, and return the files in order."""
    files = []
    for at in reversed(range(len(words))):
        name, equals, value = words[at].partition("=")
        if name == "--config":
            if not equals and at + 1 >= len(words):
                raise UserError("--config needs the path to a YAML file")
            files.append(Path(value if equals else words.pop(at + 1)))
            del words[at]
    return files[::-1]


def _file_values(path: Path, file: yaml.MappingNode, config_class: type[Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of a YAML file, converted like command-line arguments.

    Values keep their spelling: `model: 007` is the string 007, and `output_dir: 2024-01-01` is not a date.
    """
    values: dict[str, Any] = {}
    keys = list(_keys_of(path, file, config_class))
    if unknown := [(f"{path}:{line}", key) for key, _, line in keys if key not in types]:
        known = setting_names(config_class)
        lines = [f"{where}: " + describe_unknown(f"key '{key}'", key, known, "", HELP_ALL) for where, key in unknown]
        raise UserError("; ".join(lines))
    for key, value, line in keys:
        where = f"{path}:{line}"
        kind = types[key]
        if isinstance(value, yaml.SequenceNode) and get_origin(kind) is not list:
            raise UserError(f"{where}: key '{key}' must be one value, not a list")
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(item, yaml.ScalarNode) and item.tag.startswith(YAML_TAG) for item in items):
            raise UserError(f"{where}: key '{key}' does not accept nested mappings, nested lists or tags")
        if value.tag == f"{YAML_TAG}null" and not is_optional(kind):
            raise UserError(f"{where}: key '{key}' has no value; set one or remove the line")
        texts = ["none" if item.tag == f"{YAML_TAG}null" and is_optional(kind) else item.value for item in items]
        try:
            values[key] = _value_of(key, kind, texts) if texts else []
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return values


def _keys_of(path: Path, file: yaml.MappingNode, config_class: type[Any]) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield each key of a file with its value and line. Keys inside a block are yielded as `block.key`."""
    blocks, seen = block_paths(config_class), set()
    pairs = [("", *pair) for pair in file.value]
    while pairs:
        block, name, value = pairs.pop(0)
        key, line = f"{block}{name.value}", name.start_mark.line + 1
        if key in seen:
            raise UserError(f"{path}:{line}: duplicate key '{key}'; remove one")
        seen.add(key)
        if key not in blocks:
            yield key, value, line
        elif isinstance(value, yaml.MappingNode):
            pairs = [(f"{key}.", *pair) for pair in value.value] + pairs
        elif value.tag != f"{YAML_TAG}null":
            raise UserError(f"{path}:{line}: key '{key}' must be a mapping of its settings")


def _read_mapping(path: Path) -> yaml.MappingNode:
    """Parse a YAML file into its top-level mapping, without converting values."""
    try:
        top = yaml.compose(resolve_path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{path}{line}: not valid YAML ({why})") from error
    if not isinstance(top, yaml.MappingNode):
        raise UserError(f"{path}: must contain `key: value` lines")
    return top


# ------------------------------------------------------------------------------------------------------ the text of --help

BASIC = {
    "model, data and output": (
        "model student models train_data validation_data rankings demonstrations rules prompts prompt questions responses "
        "judgments validation_prompts reward_model reward_functions reward_config ppo_config limit output table output_dir "
        "resume_from_checkpoint"
    ),
    "optimization": "learning_rate num_train_epochs batch_size total_updates rollout_batch_size lora_r",
    "algorithm": "kl_coef advantage_estimator beta loss form heads rounds labeler generation scorer judge best_of samples",
    "generation": "max_response_tokens max_new_tokens temperature num_few_shot",
}
"""Settings that `--help` shows for commands with many settings, by group."""
FIRST_SENTENCE = re.compile(r"(?s).*?\.(?= [A-Z0-9]|$)|.*")
FEW = 14
"""Commands with at most this many settings show all of them."""


def help_text(config_class: type[Any], program: str, everything: bool) -> str:
    """Return the text of `--help` or `--help-all`."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 110)
    declared, blocks = {item.name: item for item in fields(config_class)}, block_paths(config_class)
    count = len(declared) + sum(len(fields(import_object(path))) - 1 for path in blocks.values())
    everything = everything or count <= FEW
    pointer = "" if everything else f"Run `{program} --help-all` for all {count} settings. "
    parser = ArgumentParser(
        usage=f"{program} [--config FILE.yaml ...] [--SETTING VALUE ...]",
        description=config_class.__doc__,
        epilog=f"{pointer}Config files contain `setting: value` lines. Command-line arguments override them.",
        add_help=False,
        formatter_class=partial(HelpFormatter, max_help_position=30, width=width),
    )
    for title, names in _all_groups(config_class) if everything else _basic_groups(declared):
        _add(parser.add_argument_group(title), config_class, names, brief=not everything)
    for block, path in blocks.items() if everything else ():
        settings = import_object(path)
        section = parser.add_argument_group(block, declared[block].metadata["help"])
        _add(section, settings, [item.name for item in fields(settings)], f"{block}.")
    return parser.format_help().rstrip()


def _add(section: Any, settings: type[Any], names: Sequence[str], prefix: str = "", brief: bool = False) -> None:
    """Add options to a section. If brief, only with the first sentence of their help."""
    hints, declared = get_type_hints(settings), {item.name: item for item in fields(settings)}
    for name in names:
        default, text = default_of(declared[name]), declared[name].metadata["help"]
        if brief and (first := FIRST_SENTENCE.match(text)):
            text = first[0]
        text = f"{text} (default: {default})" if default else text
        section.add_argument(f"--{prefix}{name}", metavar=kind_of(hints[name]), help=text.replace("%", "%%"))


def _basic_groups(declared: dict[str, Field[Any]]) -> Iterator[tuple[str, list[str]]]:
    for title, names in BASIC.items():
        if shown := [name for name in names.split() if name in declared and "block" not in declared[name].metadata]:
            yield title, shown


def _all_groups(config_class: type[Any]) -> Iterator[tuple[str, list[str]]]:
    """Group all settings except blocks by the class that declares them. Settings of the command's class come first."""
    owners: dict[str, str] = {}
    for base in config_class.__mro__:  # the last base that declares a setting owns it
        title = base.__dict__.get("help_title", "options")
        owners |= dict.fromkeys(get_annotations(base), title)
    groups: dict[str, list[str]] = {"options": []}
    for item in fields(config_class):
        if "block" not in item.metadata:
            groups.setdefault(owners[item.name], []).append(item.name)
    yield from ((title, names) for title, names in groups.items() if names)


def kind_of(hint: Any) -> str:
    """Return the metavar of a setting."""
    if get_origin(hint) is list:
        return f"{kind_of(get_args(hint)[0])} ..."
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    parts: Sequence[Any] = [part for part in get_args(hint) if part is not NoneType]
    if parts:
        return "auto|PATH" if bool in parts else kind_of(parts[0])
    return {int: "N", float: "X", bool: "true|false"}.get(hint, "TEXT")


def default_of(item: Field[Any]) -> str:
    """Return the default of a setting in YAML syntax, or "" if empty."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool | None) else str(default)
