"""The argument parser of the commands that have no settings file."""

import argparse
from typing import NoReturn

from align.core.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """A parser whose error messages are one line, like all others of this package."""

    def error(self, message: str) -> NoReturn:
        """Report a mistake on the command line.

        Raises:
            UserError: always.
        """
        raise UserError(f"{self.prog}: {message}")
