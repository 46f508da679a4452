"""Checkpoints as files: checksums that prove them whole, which of them to resume from, and how many are kept."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from align.errors import UserError
from align.files import PARTIAL, read_json, sync, write_json

CHECKSUMS = "checksums.json"
FORMAT, READABLE = 2, (1, 2)
"""The number in `checksums.json` changes when a checkpoint's files do: in 1, there were no parts of a state."""


def write_checksums(folder: Path, known: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Store size and SHA-256 of each file of a folder, as the disk gives them back.

    Args:
        known: of files that other processes have read already, by name.
    """
    files = dict(known or {})
    for path in sorted(folder.iterdir()):
        if path.name not in files:
            files[path.name] = checksum(path)
    write_json(folder / CHECKSUMS, {"format": FORMAT, "files": files})


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as the disk gives it back."""
    forget_cached(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def forget_cached(path: Path) -> None:
    """Write a file to the disk and drop it from the memory of the system, so that the next read is from the disk."""
    sync(path)
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault_of(folder: Path) -> str:
    """What is wrong with a checkpoint's files; "" if they are as they were written."""
    if not (folder / CHECKSUMS).exists():
        return f"{CHECKSUMS} is missing; an earlier version wrote it, or part of it was removed"
    try:
        stored = read_json(folder / CHECKSUMS)
        if stored["format"] not in READABLE:
            return f"another version of this package wrote it (format {stored['format']}, here {FORMAT})"
        for name, expected in stored["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _digest(path) != expected["sha256"]:
                return f"{name} holds other bytes than were written"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is broken"
    return ""


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest last."""
    return sorted((folder / "checkpoints").glob("update-*"))


def last_whole_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a run that is as it was written, and what is wrong with those after it.

    Raises:
        UserError: if there are checkpoints, and none is whole.
    """
    faults: list[str] = []
    for path in reversed(checkpoints_in(folder)):
        fault = fault_of(path)
        if not fault:
            return path, faults
        faults.append(f"{path}: {fault}")
    if faults:
        raise UserError(f"{faults[0]}; no other checkpoint is whole: move {folder / 'checkpoints'} away to start anew")
    return None, []


def set_aside(folder: Path, last: Path) -> list[str]:
    """Rename the checkpoints after the one that a run resumes from, which are not whole; says so in lines."""
    messages = []
    for path in checkpoints_in(folder):
        if path.name > last.name:
            new_path = path.with_name(f"broken-{path.name}")
            shutil.rmtree(new_path, ignore_errors=True)
            path.rename(new_path)
            messages.append(f"{path} was set aside as {new_path.name}")
    return messages


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints of a run but the newest ones; 0 removes none.

    One that a kill leaves half removed is no checkpoint any more.
    """
    for path in checkpoints_in(folder)[:-count] if count else ():
        removed = path.with_name(f".{path.name}{PARTIAL}")
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
