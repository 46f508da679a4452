"""Writing that a crash or a full disk cannot leave half done: temporary name, fsync, rename."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from align.errors import UserError


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Write a folder's files in a temporary folder that takes `target`'s name once all are on disk.

    A folder that stands at `target` is replaced in two renames, never written into.

    Raises:
        UserError: if the disk is full or not writable; what stood at `target` stays as it was.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from error
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private; a checkpoint is shared like any other file
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors writes for its owner alone
            _sync(path)
        _replace_folder(temporary, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error}); nothing was changed there") from error
    except Exception as error:
        # safetensors reports a full disk as an error of its own.
        if "No space left" in str(error):
            raise UserError(f"{target}: cannot be written (no space left); nothing was changed there") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(temporary: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Replace a text file in one step.

    Raises:
        UserError: if the disk is full or not writable; the old file stays as it was.
    """
    temporary = target.with_name(f".{target.name}-new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{target}: cannot be written ({error.strerror})") from error


def write_json(target: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: if it is missing or broken.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
