"""Rows of a round's files: samples with several answers to a prompt, and rankings of them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from align.core.files import write_text

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file that this program wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON Lines, all or nothing."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def merge_answers(parts: Sequence[Sequence[Row]], prefix: str) -> list[Row]:
    """The answers of several models to the same prompts, as one row for each prompt.

    Blank and duplicate answers are dropped, and then prompts with fewer than two answers.

    Args:
        parts: rows of `align sample`, the same prompts in the same order in each part.
        prefix: added to each id, so that a ranking names its round.
    """
    merged = []
    for rows in zip(*parts, strict=True):
        answers = {text: model for row in reversed(rows) for text, model in zip(row["responses"], row["model"], strict=True)}
        kept = [text for row in rows for text in row["responses"] if text.strip()]
        unique = list(dict.fromkeys(kept))
        if len(unique) < 2:
            continue
        first = {**rows[0], "id": f"{prefix}{rows[0]['id']}"}
        first.pop("rewards", None)
        merged.append({**first, "responses": unique, "model": [answers[text] for text in unique]})
    return merged
