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
from align.core.setting_names import NAMES
from align.core.settings import (
    MixtureConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SplitConfig,
    block_paths,
)
from align.core.settings_parser import default_of as default_text
from align.core.settings_parser import setting_names
from align.eval import TASKS
from align.eval.results import EvalConfig, EvalPromptsConfig
from align.extras.loop_labels import LoopConfig
from align.extras.plan import PlanConfig
from align.extras.rules.train import JudgmentConfig
from align.ppo import PPOConfig
from align.runtime.endpoint import EndpointConfig
from align.sampling.settings import AnsweringConfig, FewShotConfig, InferenceConfig
from align.training.data_order import EpochConfig
from align.training.layerwise import LayerwiseConfig

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

Each setting of each command, with type and default. A setting works in a YAML file (`learning_rate: 1e-5`), on the command
line (`--learning_rate 1e-5`), and as a field of the config class in Python. `align COMMAND --help` prints the most
important settings, `align COMMAND --help-all` prints all. This page is generated from the code.

Settings that several commands have are listed once, under [Shared settings](#shared-settings). A row in the table of a
command replaces the shared row of the same name.
"""
SHARED = {
    "Optimization": OptimizationConfig,
    "Run folder, checkpoints and processes": RunConfig,
    "Model and adapter": ModelConfig,
    "Passes over a data set": EpochConfig,
    "Validation split": SplitConfig,
    "Mixed data sources": MixtureConfig,
    "Learning rates by layer": LayerwiseConfig,
    "Held-out conversations": JudgmentConfig,
    "Inference": InferenceConfig,
    "Evaluation": EvalConfig,
    "Sampled answers": AnsweringConfig,
    "Prompts of an evaluation": EvalPromptsConfig,
    "Few-shot examples": FewShotConfig,
    "Endpoints": EndpointConfig,
}
"""Base classes of several commands' settings, by the heading of their table."""
SHARED_BLOCK = "rubrics"
"""The block that several commands have."""
TABLE_HEAD = ["| setting | type | default | description |", "| --- | --- | --- | --- |"]


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
    shown = default_text(field)
    return f"`{shown}`" if shown else "-"


def rows_of(config_class: type, names: list[str]) -> str:
    """A table of some settings of a class; those of a block follow it as `block.name`."""
    return "\n".join(TABLE_HEAD + lines_of(config_class, names))


def lines_of(config_class: type, names: list[str], prefix: str = "") -> list[str]:
    """The lines of some settings of a class in a table."""
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    lines = []
    for name in names:
        field = fields[name]
        help_text = field.metadata.get("help", "").replace("|", "\\|")
        block = field.metadata.get("block")
        kind, default = ("block", "-") if block else (kind_of(hints[name]), default_of(field))
        kind = f"[block](#block-{name})" if name == SHARED_BLOCK else kind
        lines.append(f"| `{prefix}{name}` | {kind} | {default} | {help_text} |")
        if block and name != SHARED_BLOCK:
            block_class = import_object(block)
            lines += lines_of(block_class, [inner.name for inner in dataclasses.fields(block_class)], f"{name}.")
    return lines


def shared_rows(config_class: type) -> dict[str, list[str]]:
    """The shared tables of a class of settings: heading -> rows."""
    return {title: lines_of(base, own_names(base)) for title, base in SHARED.items() if issubclass(config_class, base)}


def own_names(config_class: type) -> list[str]:
    """The settings that a class declares itself."""
    return [field.name for field in dataclasses.fields(config_class) if field.name in config_class.__annotations__]


def section(title: str, config_class: type) -> str:
    """The settings of one command, without the rows of the shared tables, which it links."""
    tables = shared_rows(config_class)
    known = {line for lines in tables.values() for line in lines}
    names = [field.name for field in dataclasses.fields(config_class)]
    own = [name for name in names if not known.issuperset(lines_of(config_class, [name]))]
    links = ", ".join(f"[{heading}](#{anchor(heading)})" for heading in tables)
    text = f"## {title}\n\n{rows_of(config_class, own)}\n"
    return f"{text}\nShared settings: {links}.\n" if links else text


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return heading.lower().replace(",", "").replace(" ", "-")


def shared_section() -> str:
    """The tables of shared settings and blocks."""
    parts = ["## Shared settings\n"]
    parts += [f"### {title}\n\n{rows_of(base, own_names(base))}\n" for title, base in SHARED.items()]
    block = import_object(block_paths(PPOConfig)[SHARED_BLOCK])
    rows = lines_of(block, [field.name for field in dataclasses.fields(block)], f"{SHARED_BLOCK}.")
    return "\n".join([*parts, f"### Block {SHARED_BLOCK}\n", *TABLE_HEAD, *rows, ""])


def page() -> str:
    """The whole page."""
    commands = {f"align {name}": config_class for name, config_class in stage_configs().items()}
    commands |= {"align sample": SampleConfig, "align chat": ChatConfig, "align loop": LoopConfig, "align plan": PlanConfig}
    commands |= {f"align eval {name}": task.load()[0] for name, task in TASKS.items()}
    sections = [section(title, config_class) for title, config_class in commands.items()]
    return "\n".join([HEAD, *sections, shared_section(), names_page()])


def names_page() -> str:
    """The table of names that are no settings here, for the stages that train."""
    known = {name for config_class in stage_configs().values() for name in setting_names(config_class)}
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for other in NAMES:
        here = " or ".join(", ".join(f"`{name}`" for name in names) for names in other.here if set(names) <= known)
        grouped.setdefault((other.source, here or "-", other.note), []).append(f"`{other.name}`")
    rows = [f"| {source} | {', '.join(names)} | {here} | {note} |" for (source, here, note), names in grouped.items()]
    return "\n".join(
        [
            "## Other names",
            "",
            "Names of TRL and of other stages. A command or settings file with one of them gets an error with ours.",
            "",
            "| used by | name | here | note |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
