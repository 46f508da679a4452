"""Checkpoints as files: their checksums, which of them to resume from, and how many are kept."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import PARTIAL, numbered_paths, read_json, sync, write_json
from align.runtime.distributed import gather_rows, run_on_main, shard_of_process

CHECKSUMS = "checksums.json"
FORMAT = 4
"""Format version in `checksums.json`. Increase it when the files of a checkpoint change."""


def write_checksums(folder: Path, known: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Store size and SHA-256 of each file of a folder. `known` has the checksums from other processes."""
    files = dict(known or {})
    for path in sorted(folder.iterdir()):
        if path.name not in files:
            files[path.name] = checksum(path)
    write_json(folder / CHECKSUMS, {"format": FORMAT, "files": files})


def checksum(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, read from the disk and not from the page cache."""
    drop_page_cache(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def drop_page_cache(path: Path) -> None:
    """Write a file to the disk and drop it from the page cache, so that the next read is from the disk."""
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


def integrity_error(folder: Path) -> str:
    """Return the fault in a checkpoint's files, or ""."""
    files, fault = _stored_files(folder)
    return fault or _damage(folder, files)


def _stored_files(folder: Path) -> tuple[list[tuple[str, str]], str]:
    """Return a checkpoint's files with SHA-256, largest first, and the fault in their names and sizes, or ""."""
    if not (folder / CHECKSUMS).exists():
        return [], f"{CHECKSUMS} is missing; an earlier version wrote it, or part of it was removed"
    try:
        stored = read_json(folder / CHECKSUMS)
        if stored["format"] != FORMAT:
            return [], f"another version of this package wrote it (format {stored['format']}, here {FORMAT})"
        by_size = sorted(stored["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
        for name, expected in by_size:
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return [], f"{name} has {size} bytes instead of {expected['bytes']}"
        return [(name, expected["sha256"]) for name, expected in by_size], ""
    except OSError as error:
        return [], _unreadable(folder, error)
    except (UserError, KeyError, TypeError, AttributeError):
        return [], f"{CHECKSUMS} is broken"


def _damage(folder: Path, files: Sequence[tuple[str, str]]) -> str:
    """Return an error for the first file whose SHA-256 differs from the given one, or ""."""
    try:
        damaged = (name for name, expected in files if _digest(folder / name) != expected)
        return next((f"{name} holds other bytes than were written" for name in damaged), "")
    except OSError as error:
        return _unreadable(folder, error)


def _unreadable(folder: Path, error: OSError) -> str:
    return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a run's folder by update, in ascending order."""
    return numbered_paths(folder / "checkpoints", "update-")


def latest_valid_checkpoint(folder: Path, accelerator: Accelerator | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint of a run, and the faults of later ones. All processes share the reading.

    Without an accelerator, this process reads all. Raise a UserError, on every process, if all checkpoints are damaged.
    """
    paths = list(checkpoints_in(folder).values())
    fault_of: Callable[[Path], str] = integrity_error
    if accelerator is not None:
        paths = run_on_main(lambda: list(checkpoints_in(folder).values()), accelerator)
        fault_of = partial(_fault_on_any, accelerator=accelerator)
    faults: list[str] = []
    for path in reversed(paths):
        if not (fault := fault_of(path)):
            return path, faults
        faults.append(f"{path}: {fault}")
    if faults:
        raise UserError(f"{faults[0]}; no valid checkpoint left: move {folder / 'checkpoints'} away to start over")
    return None, []


def checkpoint_to_resume(choice: bool | str, folder: Path, accelerator: Accelerator) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that a run continues from, if any, and the faults of newer ones. All processes call this.

    `choice` is `resume_from_checkpoint`. Raise a UserError, on every process, if the checkpoint does not exist or is
    damaged, or if `folder` has a newer one.
    """
    if choice is False:
        return None, []
    given = None if choice is True else Path(choice)
    if given and given.resolve().parent != (folder / "checkpoints").resolve():
        if wrong := run_on_main(partial(_no_checkpoint, given), accelerator):
            raise UserError(f"resume_from_checkpoint {given}: {wrong}")
        if fault := _fault_on_any(given, accelerator):
            raise UserError(f"resume_from_checkpoint {given}: {fault}")
        return given, []
    found, faults = latest_valid_checkpoint(folder, accelerator)
    if given and found is None:
        raise UserError(
            f"resume_from_checkpoint {given}: {folder} has no checkpoint to resume from (save_only_model and "
            "save_strategy 'no' write none)"
        )
    if given and found and found.name != given.name:
        raise UserError(
            f"resume_from_checkpoint {given}: it is not the newest checkpoint in {folder}, {found.name}; give that one, or "
            "choose another output_dir to continue from an earlier one"
        )
    return found, faults


def _no_checkpoint(given: Path) -> str:
    """Return the error for a folder that is not a checkpoint, with the run's newest one as an example; or ""."""
    if any((given / name).exists() for name in (CHECKSUMS, "trainer.json")):
        return ""
    near = [path for place in (given.parent.parent, given.parent, given) for path in checkpoints_in(place).values()]
    wrong = "not a checkpoint" if given.is_dir() else "no such folder"
    example = near[-1] if near else "runs/ppo/checkpoints/update-000010"
    return f"{wrong}; give auto, or a checkpoint such as {example}"


def _fault_on_any(path: Path, accelerator: Accelerator) -> str:
    """Return a fault that any process finds in its part of a checkpoint's files. Raise a UserError if a file is missing."""
    files, fault = run_on_main(lambda: _stored_files(path), accelerator)
    if fault:
        return fault
    share = shard_of_process(files, accelerator)
    missing = next((name for name, _ in share if not (path / name).exists()), "")
    found = gather_rows([(missing, "" if missing else _damage(path, share))], accelerator)
    for process, (name, _) in enumerate(found):
        if name:
            raise UserError(
                f"{path}: process {process} does not find {name}, which the first process does; all must see output_dir"
            )
    return next((damage for _, damage in found if damage), "")


def quarantine_later(folder: Path, last: Path) -> list[str]:
    """Rename the damaged checkpoints after `last`, which a run resumes from; return lines about it."""
    messages = []
    checkpoints = checkpoints_in(folder)
    newest = next(update for update, path in checkpoints.items() if path.name == last.name)
    for update, path in checkpoints.items():
        if update > newest:
            new_path = path.with_name(f"broken-{path.name}")
            shutil.rmtree(new_path, ignore_errors=True)
            path.rename(new_path)
            messages.append(f"{path} was renamed to {new_path.name}")
    return messages


def rotate_checkpoints(folder: Path, count: int) -> None:
    """Remove all checkpoints of a run but the newest ones, each renamed first; 0 removes none."""
    for path in list(checkpoints_in(folder).values())[:-count] if count else ():
        removed = path.with_name(f".{path.name}{PARTIAL}")
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
