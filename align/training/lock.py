"""One run in one folder: a second process that would write there is refused, and a dead one holds nothing.

The lock is the kernel's on a file, so it ends with its process however that ends. A record lock (`lockf`) rather than
`flock`: it works over NFS, and a child process does not inherit it.
"""

import errno
import json
import os
import socket
import time
from pathlib import Path

from align.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TAKEN = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, int] = {}
"""Descriptors by folder. The lock belongs to the process: closing any other descriptor of the file would end it."""


def refuse_other_run(folder: Path) -> None:
    """Refuse a folder that another process writes to; nothing is written.

    Raises:
        UserError: naming that process.
    """
    if fcntl is None or folder.resolve() in _held or not (folder / NAME).exists():
        return
    try:
        with open(folder / NAME, "rb+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            raise _taken(folder) from error


def take_lock(folder: Path) -> None:
    """Hold a folder until `release_lock` or the end of the process. A process may take its own folder again.

    Raises:
        UserError: if another process holds it.
    """
    if fcntl is None or folder.resolve() in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in TAKEN:
            raise _taken(folder) from error
        return  # a file system without locks
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(holder).encode())
    _held[folder.resolve()] = descriptor


def release_lock(folder: Path) -> None:
    """Release a folder. The file is not deleted: another process may already hold its lock."""
    descriptor = _held.pop(folder.resolve(), None)
    if descriptor is not None:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _taken(folder: Path) -> UserError:
    try:
        holder = json.loads((folder / NAME).read_text(encoding="utf-8"))
        who = f"process {holder['process']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return UserError(f"{folder}: {who} is writing a run there; wait for its end, or choose another output_dir")
