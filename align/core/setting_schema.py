"""The JSON Schema of a command's settings, by which an editor completes and checks a YAML file."""

from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from align.core.plugins import import_object
from align.core.settings import Range, declarations

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft that yaml-language-server reads whole."""
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema(config_class: type[Any], command: str) -> dict[str, Any]:
    """Return the schema of the YAML files of `align COMMAND`."""
    return {"$schema": DRAFT, "title": f"Settings of align {command}", **_object_schema(config_class)}


def _object_schema(config_class: type[Any]) -> dict[str, Any]:
    declared = declarations(config_class)  # type: ignore[arg-type]
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
