"""The text of `align COMMAND --help`: the settings that matter first; with `--help-all` every setting."""

import shutil
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from inspect import get_annotations
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from align.core.plugins import import_object
from align.core.settings import block_paths

BASIC = {
    "model, data and output": (
        "model student models train_data validation_data rankings demonstrations rules prompts prompt questions responses "
        "judgments validation_prompts reward_model reward_functions reward_config ppo_config limit output table output_dir "
        "resume_from_checkpoint"
    ),
    "optimization": "learning_rate num_train_epochs batch_size total_updates rollout_batch_size lora_r",
    "algorithm": ("kl_coef advantage_estimator beta loss form heads rounds labeler generation scorer judge best_of samples"),
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
    """Add settings to a group of argparse's help."""
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
