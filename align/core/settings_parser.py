"""Reads a YAML file plus `--key value` into a stage's settings; a wrong key gets the nearest valid one."""

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from copy import copy
from dataclasses import Field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_origin

import yaml
from transformers.hf_argparser import string_to_bool
from trl import TrlParser

from align.core.errors import UserError, nearest_name_hint
from align.core.files import resolve_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
YAML_TAG = "tag:yaml.org,2002:"  # the prefix of the tags of YAML's own types


class _Parser(TrlParser):
    """TrlParser that raises a one-line error instead of printing it with the usage of 40 options."""

    @staticmethod
    def _parse_dataclass_field(parser: ArgumentParser, field: Field[Any]) -> None:
        plain = copy(field)  # whose metadata become arguments of argparse
        plain.metadata = {"help": field.metadata.get("help")}  # type: ignore[assignment]
        TrlParser._parse_dataclass_field(parser, plain)

    def error(self, message: str) -> NoReturn:
        raise UserError(re.sub(r"^argument --(\w+)(/--[\w-]+)*", r"\1", message))


def parse(config_class: type[Settings], arguments: Sequence[str], program: str | None = None) -> Settings:
    """Read `--config FILE` and `--key value` pairs; the command line overrides the file.

    Args:
        program: the program's name in `--help`.

    Raises:
        UserError: for a missing or invalid file, an unknown key (with the nearest valid one), or a value of a wrong type.
    """
    words, names = list(arguments), [item.name for item in fields(config_class)]
    parser = _Parser(config_class, prog=program, allow_abbrev=False)  # type: ignore[arg-type]
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse itself takes -1e-5 for an option
    for action in parser._actions:
        if action.dest == "resume":
            action.type = _resume
    from_files: dict[str, list[str]] = {}
    for path in _take_config_files(words):
        from_files |= _file_words(path, config_class, parser)
    for word in words:
        name = word.split("=", 1)[0]
        if name.startswith("--") and name != "--help" and name[2:].replace("-", "_") not in names:
            raise UserError(_unknown_name(f"option {name}", name[2:].replace("-", "_"), names, "--"))
    # No command-line words stand for an empty list.
    parser.set_defaults(**{key: [] for key, values in from_files.items() if not values})
    read = [*chain.from_iterable(from_files.values()), *map(_with_underscores, words)]
    _, left_over = parser.parse_known_args(read)
    if left_over:
        raise UserError(_unexpected_word(left_over[0], words))
    (config,) = parser.parse_args_and_config(read)
    return config


def _unexpected_word(word: str, words: Sequence[str]) -> str:
    """The message for a word that belongs to no option, with the option that it follows."""
    before = words[: words.index(word)] if word in words else []
    option = next((each for each in reversed(before) if each.startswith("--")), "").partition("=")[0]
    place = f" after {option}, which takes one value" if option else ""
    return f"unexpected word {word!r}{place}; settings are given as --name value"


def _resume(word: str) -> bool:
    """Read the value of `resume`, in which `auto` is another word for true."""
    try:
        return word.lower() == "auto" or bool(string_to_bool(word))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{word!r} is none of true, false and auto") from error


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


def _with_underscores(word: str) -> str:
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def _unknown_name(what: str, name: str, names: Sequence[str], prefix: str = "") -> str:
    return f"unknown {what}" + (nearest_name_hint(name, names, prefix) or "; --help lists the valid names")


def _file_words(path: Path, config_class: type[Settings], parser: _Parser) -> dict[str, list[str]]:
    """The keys of a YAML file as command-line words (none for an empty list), so that both are checked and converted alike.

    Values are taken as they are written: `model: 007` is the text 007, and `output_dir: 2024-01-01` is not a date.
    """
    types = {item.name: item.type for item in fields(config_class)}
    words: dict[str, list[str]] = {}
    for name, value in _read_mapping(path).value:
        key, where = str(name.value), f"{path}:{name.start_mark.line + 1}"
        if key not in types:
            raise UserError(f"{where}: " + _unknown_name(f"key '{key}'", key, list(types)))
        if key in words:
            raise UserError(f"{where}: key '{key}' occurs twice; remove one")
        if isinstance(value, yaml.SequenceNode) and get_origin(types[key]) is not list:
            raise UserError(f"{where}: key '{key}' must be one value, not a list")
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(item, yaml.ScalarNode) and item.tag.startswith(YAML_TAG) for item in items):
            raise UserError(f"{where}: key '{key}': a nested mapping, a nested list or a tag is not a value")
        if value.tag == f"{YAML_TAG}bool" and types[key] is bool:  # YAML has more words (on, off) than the command line
            words[key] = [f"--{key}={yaml.safe_load(value.value)}"]
        elif isinstance(value, yaml.SequenceNode):
            words[key] = [f"--{key}", *(item.value for item in items)] if items else []
        elif value.tag != f"{YAML_TAG}null":
            words[key] = [f"--{key}={value.value}"]
        try:
            parser.parse_known_args(words.get(key, []))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return words


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
