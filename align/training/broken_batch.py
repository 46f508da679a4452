"""The end of a run whose loss or gradient is no longer a number: its batch is saved as text."""

from collections.abc import Sequence
from typing import Any, NoReturn

from align.core.errors import UserError
from align.core.files import write_json
from align.tokenization import Tokenization
from align.training.engine import NotFiniteError
from align.training.run import Run

LABELS = ("ranks", "rules", "targets", "attributes", "learned")


def stop_on_nan(run: Run, update: int, error: NotFiniteError, batch: Sequence[dict[str, object]]) -> NoReturn:
    """Save the batch that led to a NaN, as text, and end the run with a UserError."""
    path = run.folder / f"broken-batch-{update}.json"
    if run.is_main:
        write_json(path, batch)
    raise UserError(
        f"update {update}: {error}; the weights before it are unharmed, the batch is in {path}. "
        "Lower learning_rate, or look at that batch"
    ) from error


def examples_as_text(examples: Sequence[Any], tokenization: Tokenization) -> list[dict[str, object]]:
    """Return examples as texts with their labels."""
    text, found = tokenization.text, []
    for example in examples:
        several = hasattr(example, "responses")
        answer = {"responses": list(map(text, example.responses))} if several else {"response": text(example.response)}
        labels = {name: getattr(example, name) for name in LABELS if hasattr(example, name)}
        found.append({"prompt": text(example.prompt), **answer, **labels})
    return found
