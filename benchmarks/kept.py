"""Results in files, so that a repeated command continues where the last one stopped."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from align.core.files import read_json, write_json


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of a JSON file. If it does not exist, call `make`, write the result, and print the duration."""
    if not path.exists():
        began = time.monotonic()
        value = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)
        print(f"{path.stem}: finished, {time.monotonic() - began:.0f} s", flush=True)
    return read_json(path)
