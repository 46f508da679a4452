"""Writes docs/settings.md, the page of all settings, from their classes; `make docs` runs it before it builds the site."""

import dataclasses
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from align.cli import stage_configs
from align.commands.chat import ChatConfig
from align.commands.sample import SampleConfig
from align.core.plugins import import_object
from align.core.setting_names import FORMER, NAMES
from align.core.settings import ModelConfig, RunConfig
from align.core.settings_parser import setting_names
from align.eval.tasks import TASKS
from align.extras.loop_labels import LoopConfig
from align.extras.plan import PlanConfig

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

Every setting of every command, with its type and default. All of them work in a YAML file (`learning_rate: 1e-5`), on the
command line (`--learning_rate 1e-5`), and as fields of the class from Python. This page is written from the code;
`align COMMAND --help` prints those that matter first, `align COMMAND --help-all` every one.
"""


def kind_of(annotation: Any) -> str:
    """A type in words: `text`, `yes or no`, or the choices."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in parts)
    if origin is list:
        return f"list of {kind_of(parts[0])}"
    if annotation == bool | str:
        return "`auto`, `true`, `false` or text"
    if origin in (typing.Union, UnionType):
        return " or ".join(kind_of(part) for part in parts)
    return {NoneType: "`none`", str: "text", bool: "`true` or `false`", int: "whole number", float: "number"}.get(
        annotation, str(annotation)
    )


def default_of(field: dataclasses.Field) -> str:
    """The default as YAML would have it, in code; a dash where it is empty."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(default, list):
        default = " ".join(map(str, default))
    shown = str(default).lower() if isinstance(default, bool | None) else str(default)
    return f"`{shown}`" if shown else "-"


def rows_of(config_class: type, names: list[str]) -> str:
    """A table of some settings of a class; those of a block follow it as `block.name`."""
    lines = ["| setting | type | default | what it is |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + lines_of(config_class, names))


def lines_of(config_class: type, names: list[str], prefix: str = "") -> list[str]:
    """The lines of some settings of a class in a table."""
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    lines = []
    for name in names:
        field = fields[name]
        help_text = field.metadata.get("help", "").replace("%%", "%").replace("|", "\\|")
        block = field.metadata.get("block")
        kind, default = ("block", "-") if block else (kind_of(hints[name]), default_of(field))
        lines.append(f"| `{prefix}{name}` | {kind} | {default} | {help_text} |")
        if block:
            block_class = import_object(block)
            lines += lines_of(block_class, [inner.name for inner in dataclasses.fields(block_class)], f"{name}.")
    return lines


def section(title: str, config_class: type, shared: set[str]) -> str:
    """The settings of one command: its own first, then those of all stages, with their defaults here."""
    names = [field.name for field in dataclasses.fields(config_class)]
    own = [name for name in names if name not in shared]
    other = [name for name in names if name in shared]
    text = f"## {title}\n\n{rows_of(config_class, own)}\n"
    if other:
        text += f'\n??? note "Settings that all stages have"\n\n{indented(rows_of(config_class, other))}\n'
    return text


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def page() -> str:
    """The whole page."""
    shared = {field.name for config_class in (ModelConfig, RunConfig) for field in dataclasses.fields(config_class)}
    parts = [HEAD]
    for name, config_class in stage_configs().items():
        parts.append(section(f"align {name}", config_class, shared))
    parts.append(section("align sample", SampleConfig, set()))
    parts.append(section("align chat", ChatConfig, set()))
    parts.append(section("align loop", LoopConfig, set()))
    parts.append(section("align plan", PlanConfig, set()))
    parts += [section(f"align eval {name}", task.load()[0], set()) for name, task in TASKS.items()]
    parts.append(names_page())
    return "\n".join(parts)


def names_page() -> str:
    """The table of names that are no settings here, for the stages that train."""
    known = {name for config_class in stage_configs().values() for name in setting_names(config_class)}
    lines = [
        "## Other names",
        "",
        "Former names of this library, and names of other frameworks. On the command line and in a file, each prints the",
        "name to use.",
        "",
        "| framework | name | here | note |",
        "| --- | --- | --- | --- |",
    ]
    for other in NAMES:
        here = " or ".join(
            ", ".join(f"`{name}`" for name in part.split()) for part in other.here.split("|") if set(part.split()) <= known
        )
        source = "former name" if other.source == FORMER else other.source
        lines.append(f"| {source} | `{other.name}` | {here or '-'} | {other.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
