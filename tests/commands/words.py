"""What the tests of commands share: settings as words of a command line, and the rows of a file."""

import json
from pathlib import Path


def words_of(**settings) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
