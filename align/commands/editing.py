"""The commands `align schema` and `align completion`: settings for editors and shells."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from align.core.errors import UserError, nearest_name_hint
from align.core.files import write_text
from align.core.launch import Stage
from align.core.plugins import import_object
from align.core.setting_schema import json_schema
from align.core.settings import block_paths


def schema_command(words: Sequence[str], stages: Mapping[str, Stage]) -> None:
    """Print the JSON Schema of a command, or write those of all commands into a folder.

    Args:
        stages: the commands with settings; a task of `align eval` as `eval TASK`.

    Raises:
        UserError: for a command without settings.
    """
    if len(words) == 2 and words[0] == "--all":
        for name, text in schema_files(stages).items():
            write_text(Path(words[1]) / name, text)
        return
    name = " ".join(words)
    if name not in stages:
        hint = nearest_name_hint(name, stages) or f"; use one of {', '.join(stages)}"
        raise UserError(f"align schema: give a command with settings, or --all FOLDER, not '{name}'{hint}")
    print(_text(name, stages[name]), end="")


def schema_files(stages: Mapping[str, Stage]) -> dict[str, str]:
    """Return the schemas of all commands by the names of their files."""
    return {f"{name.replace(' ', '-')}.json": _text(name, stage) for name, stage in stages.items()}


def _text(name: str, stage: Stage) -> str:
    return json.dumps(json_schema(import_object(stage.config), name), indent=1, ensure_ascii=False) + "\n"


def completion_command(words: Sequence[str], stages: Mapping[str, Stage], others: Mapping[str, str]) -> None:
    """Print the completion script for a shell.

    Args:
        stages: as for `schema_command`.
        others: further commands with their line of help; their options are not completed.

    Raises:
        UserError: for an unknown shell, or if shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UserError("align completion needs shtab: pip install 'align-rlhf[completion]'") from error
    if len(words) != 1 or words[0] not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"align completion: give one of {', '.join(shtab.SUPPORTED_SHELLS)}")
    print(shtab.complete(completion_parser(stages, others), shell=words[0]))


def completion_parser(stages: Mapping[str, Stage], others: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser that knows every command, setting and choice; it only describes them."""
    parser = argparse.ArgumentParser(prog="align")
    commands = parser.add_subparsers()
    for name, text in others.items():
        commands.add_parser(name, help=text)  # shtab leaves out a command without help
    tasks = commands.add_parser("eval", help="evaluate models").add_subparsers()
    for name, stage in stages.items():
        word, _, task = name.partition(" ")
        command = (tasks if task else commands).add_parser(task or word, help=stage.help.replace("%", "%%"))
        for option in ("--help-all", "--config"):
            command.add_argument(option)
        _add_settings(command, import_object(stage.config), "")
    return parser


def _add_settings(parser: argparse.ArgumentParser, config_class: type[Any], prefix: str) -> None:
    import shtab

    blocks, hints = block_paths(config_class), get_type_hints(config_class)
    for item in fields(config_class):
        name, hint = f"--{prefix}{item.name}", hints[item.name]
        if item.name in blocks:
            _add_settings(parser, import_object(blocks[item.name]), f"{prefix}{item.name}.")
        elif get_origin(hint) is Literal:
            parser.add_argument(name, choices=[str(choice) for choice in get_args(hint)])
        elif hint is bool:
            parser.add_argument(name, choices=["true", "false"])
        elif hint in (int, float):
            parser.add_argument(name)
        else:
            parser.add_argument(name).complete = shtab.FILE  # type: ignore[attr-defined]
