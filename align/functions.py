"""Functions of the user's own, named in settings as `module:function`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from align.errors import UserError


def import_function(path: str, what: str, form: str = "module:function") -> Callable[..., Any]:
    """Import `module:function`; modules beside the working directory are found too.

    Args:
        what, form: what the function is for, and how it is written, for an error.

    Raises:
        UserError: if the module or the function is not what it should be.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's module: whatever it raises is theirs to mend
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        named = isinstance(error, (ImportError, AttributeError, ValueError))  # these say what is wrong by themselves
        why = said if named else f"{type(error).__name__}: {said}"
        raise UserError(f"{what} '{path}': {why}; write {form}") from error
    if not callable(function):
        raise UserError(f"{what} '{path}': {name} is {type(function).__name__}, not a function")
    return function
