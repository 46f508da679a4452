"""User errors, and helpers to format error messages."""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """Invalid user input: a bad file, value or model.

    The message states problem, location and remedy in one line. Programs print it without a traceback and exit with code 2.
    """


class OtherProcessError(Exception):
    """Another process of the run failed. The message gives its rank and error."""


LOST_PROCESS = (
    *("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe"),
    *("Timed out waiting", "Application timeout", "Read timeout", "NCCL error"),
)
"""Messages of gloo and NCCL about a process that exited or cannot be reached."""


def is_lost_process(error: BaseException) -> bool:
    """Return whether communication failed because another process was lost."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PROCESS)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason(error: BaseException) -> str:
    """Return the first line of an exception, prefixed with its type unless the message is clear by itself."""
    plain = isinstance(error, (OSError, ValueError, RuntimeError))
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


def short_repr(value: object) -> str:
    """Return the `repr` of a value for an error message: one line, at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


USER, PASSWORD = re.compile(r"://[^/@:\s]+@"), re.compile(r"(://[^/@:\s]*):[^/\s]+@")
QUERY = re.compile(r"([?&](?:[\w-]*(?:key|token|secret|password|signature)|auth|sig)=)[^&#\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Mask passwords, tokens and keys in the URLs of a text."""
    return QUERY.sub(r"\1***", PASSWORD.sub(r"\1:***@", USER.sub("://***@", text)))


def nearest_name(name: str, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None if all are below `similarity` (`SequenceMatcher.ratio`)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return near[0] if near else None


def nearest_name_hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?` for an unknown name, or "" if no known name is similar."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f"; did you mean {prefix}{nearest}?"
