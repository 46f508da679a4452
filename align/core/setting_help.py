"""The text of `align COMMAND --help`: the settings that matter first; with `--help-all` every setting."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
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
    "algorithm": (
        "kl_coef advantage_estimator beta loss form heads on_policy_fraction rounds labeler generation scorer judge best_of "
        "samples"
    ),
    "generation": "max_response_tokens max_new_tokens temperature num_few_shot",
}
"""The settings that `--help` shows of a command with many, by group. A command shows those that it has."""
FEW = 15
"""A command with at most so many settings shows all of them."""
COLUMN = 30
"""Where the explanations begin."""


def help_text(config_class: type[Any], program: str, everything: bool) -> str:
    """Return the text of `--help`, or of `--help-all`, for a command."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 110)
    declared = {item.name: item for item in fields(config_class)}
    count = len(declared) + sum(len(fields(import_object(path))) - 1 for path in block_paths(config_class).values())
    everything = everything or count <= FEW
    summary = textwrap.wrap(" ".join((config_class.__doc__ or "").split()), width)
    lines = [f"usage: {program} [--config FILE.yaml ...] [--SETTING VALUE ...]", "", *summary]
    for title, names in _all_groups(config_class) if everything else _basic_groups(declared):
        lines += ["", f"{title}:"]
        for name in names:
            lines += _entry(name, declared[name], get_type_hints(config_class)[name], width)
    if everything:
        for block, path in block_paths(config_class).items():
            lines += ["", *textwrap.wrap(f"{block}: {declared[block].metadata['help']}", width)]
            hints = get_type_hints(import_object(path))
            for item in fields(import_object(path)):
                lines += _entry(f"{block}.{item.name}", item, hints[item.name], width)
    more = "" if everything else f"{program} --help-all explains all {count} settings. "
    lines += ["", *textwrap.wrap(f"{more}A file holds lines `setting: value`; the command line overrides it.", width)]
    return "\n".join(line.replace("%%", "%") for line in lines)


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


def _entry(name: str, item: Field[Any], hint: Any, width: int) -> list[str]:
    """The lines of a setting."""
    left = f"  --{name} {kind_of(hint)}".rstrip()
    default = default_of(item)
    text = f"{item.metadata['help']} (default: {default})" if default else item.metadata["help"]
    right = textwrap.wrap(text, width - COLUMN)
    if len(left) > COLUMN - 2:
        return [left, *(" " * COLUMN + line for line in right)]
    return [left.ljust(COLUMN) + right[0], *(" " * COLUMN + line for line in right[1:])]


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
