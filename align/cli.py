"""The command `align`: it reads the words of the command line and calls the function that does the work."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from align.config import RunConfig, parse
from align.errors import UserError

Stage = TypeVar("Stage", bound=RunConfig)


def run_stage(config_class: type[Stage], stage: Callable[[Stage], object], arguments: Sequence[str] | None = None) -> None:
    """Run a stage with settings from the command line; a user's mistake is one line and exit code 2."""
    try:
        stage(parse(config_class, sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
