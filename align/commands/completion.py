"""The command `align completion`: a script that completes commands, settings and choices in a shell."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from align.core.errors import UserError
from align.core.launch import Stage
from align.core.plugins import import_object, require_extra
from align.core.settings import block_paths


def completion_command(words: Sequence[str], stages: Mapping[str, Stage], others: Mapping[str, str]) -> None:
    """Print the completion script for a shell.

    Args:
        stages: the commands with settings; a task of `align eval` as `eval TASK`.
        others: further commands with their line of help; their options are not completed.
    """
    with require_extra("completion"):
        import shtab
    if {"-h", "--help"} & set(words):
        shells = "|".join(shtab.SUPPORTED_SHELLS)
        print(f"usage: align completion {shells}\n\nPrint a script that completes commands and settings in a shell.")
        return
    if len(words) != 1 or words[0] not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"align completion: give one of {', '.join(shtab.SUPPORTED_SHELLS)}")
    parser = argparse.ArgumentParser(prog="align")  # which only describes the commands
    commands = parser.add_subparsers()
    for name, text in others.items():
        commands.add_parser(name, help=text)  # shtab leaves out a command without help
    tasks = commands.add_parser("eval", help="evaluate models").add_subparsers()
    for name, stage in stages.items():
        word, _, task = name.partition(" ")
        command = (tasks if task else commands).add_parser(task or word, help=stage.help.replace("%", "%%"))
        for option in ("--help-all", "--config"):
            command.add_argument(option)
        _add_settings(command, import_object(stage.config), "", shtab.FILE)
    print(shtab.complete(parser, shell=words[0]))


def _add_settings(parser: argparse.ArgumentParser, config_class: type[Any], prefix: str, file: Any) -> None:
    blocks, hints = block_paths(config_class), get_type_hints(config_class)
    for item in fields(config_class):
        name, hint = f"--{prefix}{item.name}", hints[item.name]
        if item.name in blocks:
            _add_settings(parser, import_object(blocks[item.name]), f"{prefix}{item.name}.", file)
        elif get_origin(hint) is Literal or hint is bool:
            parser.add_argument(name, choices=[str(choice) for choice in get_args(hint) or ("true", "false")])
        elif hint in (int, float):
            parser.add_argument(name)
        else:
            parser.add_argument(name).complete = file  # type: ignore[attr-defined]
