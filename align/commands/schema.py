"""`align schema`: the JSON Schema of a command's settings, by which an editor completes and checks a YAML file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from align.core.errors import UserError, nearest_name_hint
from align.core.files import write_text
from align.core.launch import Stage
from align.core.plugins import import_object
from align.core.settings import Range, declarations

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft that yaml-language-server reads whole."""
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_command(words: Sequence[str], stages: Mapping[str, Stage]) -> None:
    """Print the JSON Schema of a command, or write those of all commands into a folder.

    Args:
        stages: the commands with settings; a task of `align eval` as `eval TASK`.
    """
    if {"-h", "--help"} & set(words):
        what = "Print the JSON Schema of a command's YAML files, or write those of all commands."
        print(f"usage: align schema COMMAND | --all FOLDER\n\n{what}")
        return
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
    schema = {"$schema": DRAFT, "title": f"Settings of align {name}", **_object_schema(import_object(stage.config))}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _object_schema(config_class: type[Any]) -> dict[str, Any]:
    declared = declarations(config_class)
    found = {item.name: _setting_schema(item, *declared[item.name]) for item in fields(config_class)}
    return {"type": "object", "properties": found, "additionalProperties": False}


def _setting_schema(item: Field[Any], hint: Any, limits: Range) -> dict[str, Any]:
    described: dict[str, Any] = {"description": item.metadata["help"].replace("%%", "%")}
    if block := item.metadata.get("block"):
        return described | {"anyOf": [_object_schema(import_object(block)), {"type": "null"}]}
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return described | {"default": default} | _value_schema(hint, limits)


def _value_schema(hint: Any, limits: Range) -> dict[str, Any]:
    """The schema of a value of a type within limits."""
    if get_origin(hint) is list:  # a single value may stand alone
        one = _value_schema(get_args(hint)[0], limits)
        return {"anyOf": [{"type": "array", "items": one}, one]}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if parts := get_args(hint):
        options = [_value_schema(part, limits) for part in parts if part is not NoneType]
        return {"anyOf": [*options, *([{"type": "null"}, {"const": "none"}] if NoneType in parts else [])]}
    if hint is str:
        return {"enum": list(limits.choices)} if limits.choices else {"type": ["string", "number", "boolean"]}
    names = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
    bounds = {key: getattr(limits, name) for name, key in names.items() if getattr(limits, name) is not None}
    value = {"type": TYPES[hint], **(bounds if hint is not bool else {})}
    return value if limits.off is None else {"anyOf": [value, {"const": limits.off}]}
