"""The one kind of error that a user can correct: it is printed as a single line and ends the program with exit code 2."""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user gave: a file, a value, a model that does not fit.

    The message is one line: what is wrong, where, and what to do. `align.core.launch.one_line_errors` prints it
    without a traceback; a library caller can catch it like any exception.
    """


class OtherProcessError(Exception):
    """Another process of the run failed, so this one cannot go on either; the message names it and its error."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: libraries write pages, a user gets one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason(error: BaseException) -> str:
    """The first line of an exception, with its type where the message alone may say nothing, as that of a KeyError."""
    plain = isinstance(error, (OSError, ValueError, RuntimeError))
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


USER, PASSWORD = re.compile(r"://[^/@:\s]+@"), re.compile(r"(://[^/@:\s]*):[^/\s]+@")
QUERY = re.compile(r"([?&](?:[\w-]*(?:key|token|secret|password|signature)|auth|sig)=)[^&#\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """A text without the passwords, tokens and keys in the addresses that it names: for files and logs that others read."""
    return QUERY.sub(r"\1***", PASSWORD.sub(r"\1:***@", USER.sub("://***@", text)))


def nearest_name(name: str, known: Iterable[str], similarity: float = 0.5) -> str | None:
    """The known name that is most similar to `name`, or None if no one is similar enough.

    Args:
        name: what the user wrote.
        known: the valid names.
        similarity: how similar a name must be at least, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return near[0] if near else None


def nearest_name_hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: `; did you mean X?`, or "" if no known name is similar.

    Args:
        name: what the user wrote.
        known: the valid names.
        prefix: what comes before a valid name, `--` for instance.
    """
    nearest = nearest_name(name, known)
    return "" if nearest is None else f"; did you mean {prefix}{nearest}?"
