"""The one kind of error that a user can mend: it is printed as a single line and ends the program with exit code 2."""


class UserError(Exception):
    """A mistake in what the user gave: a file, a value, a model that does not fit.

    The message is one line that says what is wrong, where, and what to do about it. `align.cli.run_main` prints it
    without a traceback; a library caller can catch it like any exception.
    """
