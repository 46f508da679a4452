"""Recognizes the training examples of a checkpoint: the number of an update decides which of them it reads."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from align.core.errors import UserError


def examples_digest(examples: Iterable[Any]) -> str:
    """A digest of examples in their order: of the token ids of prompts and responses, and of other values as text."""
    digest = hashlib.sha256()
    for example in examples:
        lists = list(_contents(example))
        digest.update(array("q", [len(lists), *map(len, lists)]).tobytes())
        for values in lists:
            digest.update(array("q", values).tobytes())
    return digest.hexdigest()


def _contents(example: Any) -> Iterator[Sequence[int]]:
    for part in getattr(example, "parts", (example,)):
        if hasattr(part, "prompt"):
            yield part.prompt
            yield from part.responses if hasattr(part, "responses") else [part.response]
        else:
            yield list(repr(part).encode())


def require_same_examples(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume on other examples than those of the checkpoint.

    Args:
        what: the examples, for the message.
        before: what the checkpoint stores of them; empty: an earlier version wrote it, which stored nothing.
        now: the same of this run. `examples` is their number.

    Raises:
        UserError: if they differ.
    """
    if not before or dict(before) == dict(now):
        return
    counts = [values.get("examples", "unknown") for values in (before, now)]
    how = f"then {counts[0]}, now {counts[1]}" if counts[0] != counts[1] else "others, or in another order"
    raise UserError(
        f"{what} are not those that this run began with ({how}); resume it with the same data, limits and weights of "
        "sources, or give another output_dir"
    )
