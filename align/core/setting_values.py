"""Conversion of setting values to their declared types."""

import os
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from align.core.errors import UserError

TEXTS = ("instruction", "task_prefixes", "fallback", "prompt", "system")
"""Settings that hold text for a model. `~` is not expanded in them."""
EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string or a path"}


def convert(name: str, value: object, hint: Any) -> object:
    """Convert a setting's value to its declared type. Raise a UserError if the type does not match."""
    if get_origin(hint) is list:
        items = list(value) if isinstance(value, list | tuple) else [value]
        return [convert(name, item, get_args(hint)[0]) for item in items]
    if is_optional(hint):
        return None if value is None else convert(name, value, get_args(hint)[0])
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{name} is {value!r}, but must be one of {', '.join(map(str, get_args(hint)))}")
        return value
    is_bool = isinstance(value, bool)
    if hint is bool and is_bool:
        return value
    if hint == bool | str:
        return _switch_or_path(name, value)
    if hint is int and isinstance(value, Integral) and not is_bool:
        return int(value)
    if hint is float and isinstance(value, Real) and not is_bool:
        try:
            number = float(value)
        except OverflowError as error:
            raise UserError(f"{name} is too large for a float: {str(value)[:20]}...") from error
        return value if isinstance(value, int | float) else number
    if hint is str and isinstance(value, str | os.PathLike):
        return _with_home(os.fspath(value)) if name not in TEXTS else value
    if hint in EXPECTED:
        raise UserError(f"{name} is {value!r} ({type(value).__name__}), but must be {EXPECTED[hint]}")
    return value


def _switch_or_path(name: str, value: object) -> bool | str:
    """Convert a value that is a bool or a path. `auto` means true."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name} is {value!r} ({type(value).__name__}), but must be auto, true, false or a path")
    word = os.fspath(value)
    if word.lower() in ("auto", "true", "yes", "on", "1"):
        return True
    return _with_home(word) if word.lower() not in ("false", "no", "off", "0", "") else False


def is_optional(hint: Any) -> bool:
    """Return whether a type is `X | None`."""
    return NoneType in get_args(hint)


def _with_home(path: str) -> str:
    """Expand ~ in a path, optionally prefixed with `model:`."""
    prefix = "model:" if path.startswith("model:~") else ""
    return prefix + os.path.expanduser(path.removeprefix(prefix))
