"""Atomic writes of files and folders (temporary name, fsync, rename), and paths of files shipped with the package."""

import errno
import glob
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from align.core.errors import UserError

PARTIAL, REPLACED = ".partial", ".replaced"
"""Suffixes of hidden names: for targets being written or removed, and for targets being replaced."""
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)
"""Errors of file systems that do not support syncing a folder, such as CIFS and some FUSE mounts."""


def sync(path: Path) -> None:
    """Flush a file or a folder's directory entries to disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise


def numbered_paths(folder: Path, prefix: str, ending: str = "") -> dict[int, Path]:
    """Map number to path for all names in a folder of the form prefix, number, ending."""
    form = re.compile(rf"{re.escape(prefix)}([0-9]+){re.escape(ending)}")
    matches = ((form.fullmatch(path.name), path) for path in folder.glob(f"{prefix}*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` (in two renames) once all its files are on disk.

    Raise a UserError if the disk is full or not writable; `target` is then unchanged.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=PARTIAL, dir=target.parent))
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from error
    try:
        _set_mode(temporary, 0o755)  # mkdtemp creates private folders
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _set_mode(path, 0o644)  # safetensors creates files that only the owner can read
            sync(path)
        _replace_folder(temporary, target)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror or error}); the old contents are unchanged"
        ) from error
    except Exception as error:
        # Rust libraries raise custom exception types for a full disk, a quota or a file size limit.
        if not isinstance(error, UserError) and "os error" in str(error):
            raise UserError(f"{target}: cannot be written ({error}); the old contents are unchanged") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_mode(path: Path, mode: int) -> None:
    with suppress(PermissionError, NotImplementedError):
        path.chmod(mode)


def _replace_folder(temporary: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}{REPLACED}")
    if old.exists() and not target.exists():  # killed between the two renames: restore the last complete one
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    try:
        sync(target.parent)
    except OSError as error:
        raise UserError(f"{target}: written, but syncing the folder failed ({error.strerror})") from error
    shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(folder: Path) -> None:
    """Remove partial files of killed processes from a folder and its subfolders. No other process may be writing.

    A folder that was being replaced gets its name back unless its successor is complete.
    """
    for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        for path in place.glob(f".*{REPLACED}"):
            target = place / path.name.removeprefix(".").removesuffix(REPLACED)
            if not target.exists():
                path.rename(target)
            shutil.rmtree(path, ignore_errors=True)
        for path in place.glob(f".*{PARTIAL}"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def clear_partial(target: Path) -> None:
    """Remove leftovers of `new_folder(target)` from killed processes. No other process may be writing to it."""
    for path in target.parent.glob(f".{glob.escape(target.name)}-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary binary file that atomically replaces `target` once it is on disk.

    Raise an OSError if the disk is full or not writable; `target` is then unchanged.
    """
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}{PARTIAL}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        if os.name == "posix":  # Windows cannot open a folder
            sync(target.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Atomically replace a text file. Raise a UserError if that fails, leaving the old file unchanged."""
    try:
        with new_file(target) as file:
            file.write(text.encode())
    except (OSError, UnicodeEncodeError) as error:
        raise UserError(f"{target}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def write_json(target: Path, value: Any) -> None:
    """Atomically replace a JSON file."""
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise a UserError if it is missing or not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, including line endings.

    Only a line feed ends a line. `str.splitlines` would also cut at U+0085 and U+2028, which strings in JSON may contain.
    """
    with open(path, encoding="utf-8", newline="\n") as file:
        return list(file)


def read_json_lines(path: Path) -> list[Any]:
    """Read the rows of a JSON Lines file that this package wrote."""
    return [json.loads(line) for line in read_lines(path) if line.strip()]


def write_json_lines(target: Path, rows: Iterable[Any]) -> None:
    """Atomically replace a JSON Lines file."""
    write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, completely or not at all. Raise an OSError if the disk is full."""
    data = line.encode()
    with open(path, "ab", buffering=0) as file:
        length = file.tell()
        try:
            if file.write(data) < len(data):  # a disk that fills up within the line raises no error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


FOLDERS = ("configs", "data", "forms")


def package_data_root() -> Path:
    """Return the folder that contains configs/, data/ and forms/: the installed package or the root of a checkout."""
    package = Path(str(files("align")))
    installed = package / "_package_data"
    return installed if installed.is_dir() else package.parent


def resolve_path(path: str | Path) -> Path:
    """Resolve a path from the settings, with ~ expanded. The path does not have to exist.

    A path is relative to the working directory. If no file exists there, the path of a shipped file (`data/prompts.jsonl`,
    `configs/eval/lm-eval.yaml`) refers to that file.
    """
    expanded = Path(os.path.expanduser(path))  # unlike Path.expanduser, keeps unknown user names
    if expanded.parts[:1] in [(folder,) for folder in FOLDERS] and ".." not in expanded.parts and not expanded.exists():
        shipped = package_data_root() / expanded
        if shipped.is_file():
            return shipped
    return expanded
