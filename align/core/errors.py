"""Errors that a user can correct, and the text of error messages."""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in the user's input: a file, a value, or a model that does not fit.

    The message states problem, location and remedy in one line. A program prints it without a traceback, with exit code 2.
    """


class OtherProcessError(Exception):
    """Another process of the run failed; the message names it and its error."""


LOST_PROCESS = (
    *("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe"),
    *("Timed out waiting", "Application timeout", "Read timeout", "NCCL error"),
)
"""Messages of gloo and NCCL about a process that has gone, or whose machine cannot be reached."""


def is_lost_process(error: BaseException) -> bool:
    """Return whether an exchange with another process failed because that has gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PROCESS)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason(error: BaseException) -> str:
    """Return the first line of an exception, with its type where the message alone may mean nothing, as for a KeyError."""
    plain = isinstance(error, (OSError, ValueError, RuntimeError))
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


def short_repr(value: object) -> str:
    """Return a value for an error message: its `repr` in one line, cut to 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


USER, PASSWORD = re.compile(r"://[^/@:\s]+@"), re.compile(r"(://[^/@:\s]*):[^/\s]+@")
QUERY = re.compile(r"([?&](?:[\w-]*(?:key|token|secret|password|signature)|auth|sig)=)[^&#\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Mask the passwords, tokens and keys in the addresses of a text."""
    return QUERY.sub(r"\1***", PASSWORD.sub(r"\1:***@", USER.sub("://***@", text)))


def nearest_name(name: str, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None below this similarity (`difflib.SequenceMatcher.ratio`)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return near[0] if near else None


def nearest_name_hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown name: `; did you mean X?`, or "" if no known name is similar."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f"; did you mean {prefix}{nearest}?"
