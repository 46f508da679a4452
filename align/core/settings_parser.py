"""Reads a YAML file plus `--key value` into a stage's settings, and writes the text of `--help`."""

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
HELP_ALL = "--help-all lists the valid names"
SHORT_OPTION = re.compile(r"-[^\d.\s]\S*")  # there are none; -1e-5 is a number
YAML_TAG = "tag:yaml.org,2002:"  # the prefix of the tags of YAML's own types


TRUE, FALSE = ("true", "yes", "on", "y", "t", "1"), ("false", "no", "off", "n", "f", "0")


def parse(config_class: type[Settings], arguments: Sequence[str], program: str | None = None) -> Settings:
    """Read `--config FILE` and `--key value` pairs; the command line overrides the file.

    `program` is the name in `--help`, which prints the settings and ends the program. Raise a UserError for a missing or
    invalid file, an unknown key (with the nearest valid one), or a value of a wrong type.
    """
    # Hyphens and underscores are alike in names of settings.
    words = [re.sub("^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in arguments]
    if asked := {"-h", "--help", "--help_all"} & set(words):
        print(help_text(config_class, program or Path(sys.argv[0]).name, "--help_all" in asked))
        raise SystemExit(0)
    files = [(path, _read_mapping(path)) for path in _take_config_files(words)]
    names = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    blocks = _given_blocks(config_class, names, [file for _, file in files])
    types = _types_of(config_class)
    for name in blocks:
        types |= _types_of(import_object(block_paths(config_class)[name]), f"{name}.")
    given: dict[str, Any] = {}
    for path, file in files:
        given |= _file_values(path, file, config_class, types)
    if unknown := [_unknown_option(name, config_class) for name in names if name not in types]:
        raise UserError("; ".join(unknown))
    given |= _word_values(words, types)
    values: dict[str, Any] = {name: {} for name in blocks}
    for name, value in given.items():
        block, _, inner = name.partition(".")
        if inner:
            values[block][inner] = value
        else:
            values[name] = value
    return config_class(**values)


def _types_of(config_class: type[Any], prefix: str = "") -> dict[str, Any]:
    """The type of each setting that is no block."""
    hints, blocks = get_type_hints(config_class), block_paths(config_class)
    return {prefix + item.name: hints[item.name] for item in fields(config_class) if item.name not in blocks}


def _word_values(words: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `--name value`, `--name=value` and, for a list, `--name value value`; the last of one name counts."""
    options: list[tuple[str, list[str]]] = []
    takes_more = False
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            options.append((name, [text] if equals else []))
            takes_more = not equals
        elif takes_more and not SHORT_OPTION.fullmatch(word):
            name, texts = options[-1]
            texts.append(word)
            takes_more = get_origin(types[name]) is list
        else:
            raise UserError(_unexpected_word(word, options[-1][0] if options else ""))
    return {name: _value_of(name, types[name], texts) for name, texts in options}


def _value_of(name: str, hint: Any, texts: Sequence[str]) -> Any:
    """The value of a setting as it was written. Raise a UserError that begins with its name."""
    if not texts and hint in (bool, bool | str):
        return True
    is_list = get_origin(hint) is list
    if not texts:
        raise UserError(f"{name}: expected {'at least one' if is_list else 'one'} argument")
    values = [_read_text(name, get_args(hint)[0] if is_list else hint, text) for text in texts]
    return values if is_list else values[0]


def _read_text(name: str, hint: Any, text: str) -> Any:
    if is_optional(hint):
        return None if text.lower() in ("none", "null") else _read_text(name, get_args(hint)[0], text)
    if get_origin(hint) is Literal:
        choices = {str(each): each for each in get_args(hint)}
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


def _given_blocks(config_class: type[Any], names: Sequence[str], files: Sequence[yaml.MappingNode]) -> list[str]:
    keys = [(str(key.value), value) for file in files for key, value in file.value]
    given = {key for key, value in keys if isinstance(value, yaml.MappingNode)}
    given |= {name.partition(".")[0] for name in (*names, *(key for key, _ in keys)) if "." in name}
    return [name for name in block_paths(config_class) if name in given]


def _unknown_option(name: str, config_class: type[Any]) -> str:
    """The message for an option that does not exist, or that names a whole block."""
    known = setting_names(config_class)
    if name in block_paths(config_class):
        inner = [f"--{other}" for other in known if other.startswith(f"{name}.")]
        return f"--{name} is a block of settings: give {', '.join(inner)}"
    return describe_unknown(f"option --{name}", name, known, "--", HELP_ALL)


def _unexpected_word(word: str, option: str) -> str:
    """The message for a word that belongs to no option, with the name of the one that it follows."""
    place = f" after --{option}, which takes one value" if option else ""
    return f"unexpected word {word!r}{place}; settings are given as --name value"


def _take_config_files(words: list[str]) -> list[Path]:
    """Remove `--config FILE` and `--config=FILE` from the words; return the files in their order."""
    files = []
    for at in reversed(range(len(words))):
        name, equals, value = words[at].partition("=")
        if name == "--config":
            if not equals and at + 1 >= len(words):
                raise UserError("--config needs the path of a YAML file")
            files.append(Path(value if equals else words.pop(at + 1)))
            del words[at]
    return files[::-1]


def _file_values(path: Path, file: yaml.MappingNode, config_class: type[Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a YAML file, which are converted as those of the command line.

    They are taken as they are written: `model: 007` is the text 007, and `output_dir: 2024-01-01` is not a date.
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
            raise UserError(f"{where}: key '{key}': a nested mapping, a nested list or a tag is not a value")
        if value.tag == f"{YAML_TAG}null" and not is_optional(kind):
            raise UserError(f"{where}: key '{key}' has no value; give one, or remove the line")
        texts = ["none" if item.tag == f"{YAML_TAG}null" and is_optional(kind) else item.value for item in items]
        try:
            values[key] = _value_of(key, kind, texts) if texts else []
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return values


def _keys_of(path: Path, file: yaml.MappingNode, config_class: type[Any]) -> Iterator[tuple[str, yaml.Node, int]]:
    """Each key of a file with its value and line; those of a block as `block.key`."""
    blocks, seen = block_paths(config_class), set()
    pairs = [("", *pair) for pair in file.value]
    while pairs:
        block, name, value = pairs.pop(0)
        key, line = f"{block}{name.value}", name.start_mark.line + 1
        if key in seen:
            raise UserError(f"{path}:{line}: key '{key}' occurs twice; remove one")
        seen.add(key)
        if key not in blocks:
            yield key, value, line
        elif isinstance(value, yaml.MappingNode):
            pairs = [(f"{key}.", *pair) for pair in value.value] + pairs
        elif value.tag != f"{YAML_TAG}null":
            raise UserError(f"{path}:{line}: key '{key}' must be a mapping of its settings")


def _read_mapping(path: Path) -> yaml.MappingNode:
    """The top-level mapping of a YAML file, with every value as it is written there."""
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
"""The settings that `--help` shows of a command with many, by group. A command shows those that it has."""
FEW = 15
"""A command with at most so many settings shows all of them."""


def help_text(config_class: type[Any], program: str, everything: bool) -> str:
    """Return the text of `--help`, or of `--help-all`, for a command."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 110)
    declared, blocks = {item.name: item for item in fields(config_class)}, block_paths(config_class)
    count = len(declared) + sum(len(fields(import_object(path))) - 1 for path in blocks.values())
    everything = everything or count <= FEW
    more = "" if everything else f"{program} --help-all explains all {count} settings. "
    parser = ArgumentParser(
        usage=f"{program} [--config FILE.yaml ...] [--SETTING VALUE ...]",
        description=config_class.__doc__,
        epilog=f"{more}A file holds lines `setting: value`; the command line overrides it.",
        add_help=False,
        formatter_class=partial(HelpFormatter, max_help_position=30, width=width),
    )
    for title, names in _all_groups(config_class) if everything else _basic_groups(declared):
        _add(parser.add_argument_group(title), config_class, names)
    for block, path in blocks.items() if everything else ():
        settings = import_object(path)
        section = parser.add_argument_group(block, declared[block].metadata["help"])
        _add(section, settings, [item.name for item in fields(settings)], f"{block}.")
    return parser.format_help().rstrip()


def _add(section: Any, settings: type[Any], names: Sequence[str], prefix: str = "") -> None:
    hints, declared = get_type_hints(settings), {item.name: item for item in fields(settings)}
    for name in names:
        default, text = default_of(declared[name]), declared[name].metadata["help"]
        text = f"{text} (default: {default})" if default else text
        section.add_argument(f"--{prefix}{name}", metavar=kind_of(hints[name]), help=text.replace("%", "%%"))


def _basic_groups(declared: dict[str, Field[Any]]) -> Iterator[tuple[str, list[str]]]:
    for title, names in BASIC.items():
        if found := [name for name in names.split() if name in declared and "block" not in declared[name].metadata]:
            yield title, found


def _all_groups(config_class: type[Any]) -> Iterator[tuple[str, list[str]]]:
    """All settings but blocks, by the class that declares them first; those of the command itself come first."""
    owners: dict[str, str] = {}
    for base in config_class.__mro__:  # up to the class that declares it first
        title = base.__dict__.get("help_title", "settings of this command")
        owners |= dict.fromkeys(get_annotations(base), title)
    groups: dict[str, list[str]] = {"settings of this command": []}
    for item in fields(config_class):
        if "block" not in item.metadata:
            groups.setdefault(owners[item.name], []).append(item.name)
    yield from ((title, names) for title, names in groups.items() if names)


def kind_of(hint: Any) -> str:
    """The kind of a setting's value in words of a usage line."""
    if get_origin(hint) is list:
        return f"{kind_of(get_args(hint)[0])} ..."
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    parts: Sequence[Any] = [part for part in get_args(hint) if part is not NoneType]
    if parts:
        return "auto|PATH" if bool in parts else kind_of(parts[0])
    return {int: "N", float: "X", bool: "true|false"}.get(hint, "TEXT")


def default_of(item: Field[Any]) -> str:
    """The default of a setting as YAML writes it; "" where it is empty."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool | None) else str(default)
