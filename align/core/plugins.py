"""Code referenced as `module:name`: lazily imported parts of this package, and user functions."""

import hashlib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from align.core.errors import OtherProcessError, UserError, first_line, is_lost_process, short_repr

UNPINNED = {"vllm"}
"""Extras that conflict with the versions in constraints.txt."""


def import_object(path: str) -> Any:
    """Import an object of this package given as "module:name"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Convert a missing module inside the context into a UserError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; {install_hint(extra)}") from error


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, for error messages."""
    pins = "" if extra in UNPINNED else "-c constraints.txt "
    return f"install the extra {extra} in the clone: pip install {pins}-e '.[{extra}]'"


def import_function(path: str, purpose: str, form: str = "module:function") -> Callable[..., Any]:
    """Import `module:function`. Modules in the working directory are found too.

    Raise a UserError that begins with `purpose` and ends with `form` if the import fails or the object is not a function.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # user modules may raise anything
        kind = "" if isinstance(error, (ImportError, AttributeError, ValueError)) else f"{type(error).__name__}: "
        raise UserError(f"{purpose} '{path}': {kind}{first_line(error)}; use {form}") from error
    if not callable(function):
        raise UserError(f"{purpose} '{path}': {name} is {type(function).__name__}, not a function")
    return function


def call_own_code(
    who: str, function: Callable[..., Any], /, *arguments: Any, advice: str = "", collective: bool = False, **named: Any
) -> Any:
    """Call a user function. Generators are converted to lists.

    Args:
        who: name of the function, with which an error begins.
        advice: end of the error message.
        collective: whether all processes call it together. The loss of a process is then not an error of the function.

    Raises:
        UserError: if the function raises. One line with the error and the last executed line of the function's file.
    """
    try:
        returned = function(*arguments, **named)
        return list(returned) if inspect.isgenerator(returned) else returned
    except (UserError, OtherProcessError):
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        if collective and is_lost_process(error):
            raise
        code, frames = getattr(inspect.unwrap(function), "__code__", None), traceback.extract_tb(error.__traceback__)
        first = frames[:2][-1]  # this call, or the first line inside a class or partial
        file, line = (code.co_filename, code.co_firstlineno) if code else (first.filename, first.lineno)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == file), line)
        end = f"; {advice}" if advice else ""
        raise UserError(f"{who} failed: {type(error).__name__}: {first_line(error)} ({file}:{line}){end}") from error


def source_version(function: Callable[..., Any]) -> str:
    """Return 12 hex digits of the hash of a function's source file."""
    try:
        return hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:12]
    except (TypeError, OSError):  # a callable object, or a compiled function
        return "unknown version"


def checked_scores(
    given: object,
    count: int,
    who: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    items: str = "items",
    describe: Callable[[int], str] | None = None,
    rule: str = "",
    advice: str = "",
) -> list[float]:
    """Validate scores returned by a user function or a server.

    Any real number is valid: Python's, numpy's, an array or a tensor of no dimensions, True and False as 1 and 0.

    Args:
        who: source of the scores, with which an error begins.
        items: the scored items, in the plural, for error messages.
        describe: function that returns the name of an item by index, for error messages.
        rule: requirement on a score, for error messages. Default: a number in the range.
        advice: end of the error message.

    Raises:
        UserError: if the value is not a list of `count` finite numbers in the range.
    """
    end = f"; {advice}" if advice else ""
    try:
        if isinstance(given, (Mapping, Set)):
            raise TypeError("unordered, or a mapping")
        values: list[Any] = list(given)  # type: ignore[call-overload]
    except TypeError as error:
        raise UserError(f"{who} must return a list of numbers, but returned {short_repr(given)}{end}") from error
    if len(values) != count:
        raise UserError(f"{who} returned {len(values)} scores for {count} {items}{end}")
    bounded = math.isfinite(low) and math.isfinite(high)
    expected = f": {rule}" if rule else f", not a number from {low:g} to {high:g}" if bounded else ", not a finite number"
    scores = []
    for index, value in enumerate(values):
        place = f" for {describe(index)}" if describe else ""
        score = _as_float(value)
        if score is None:
            raise UserError(f"{who} must return a list of numbers, but returned {short_repr(value)}{place}{end}")
        if not (math.isfinite(score) and low <= score <= high):
            raise UserError(f"{who} gave {score}{place}{expected}{end}")
        scores.append(score)
    return scores


def _as_float(value: Any) -> float | None:
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers raises RuntimeError
        return None
