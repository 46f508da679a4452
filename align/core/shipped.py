"""The files that come with the package: configs/, data/ and forms/ of the repository; in a wheel, align/_shipped/."""

import os
from importlib.resources import files
from pathlib import Path

FOLDERS = ("configs", "data", "forms")


def shipped_root() -> Path:
    """The folder that holds configs/, data/ and forms/: in the installed package, or the root of a checkout."""
    package = Path(str(files("align")))
    installed = package / "_shipped"
    return installed if installed.is_dir() else package.parent


def is_shipped(path: str | Path) -> bool:
    """Whether a path in settings means a file of the package, not one of the user's."""
    found, root = resolve_path(path).resolve(), shipped_root().resolve()
    return found.exists() and any(found.is_relative_to(root / folder) for folder in FOLDERS)


def resolve_path(path: str | Path) -> Path:
    """The file or folder that a path in settings means.

    A path means what is there, seen from the working directory. Only where nothing is there, and the path is that of a
    shipped file (`data/prompts.jsonl`, `configs/eval/all.yaml`), it means the shipped file: the defaults work in any folder,
    and a file of the user's own with the same path comes first.

    Returns:
        The path, with ~ expanded; it need not exist.
    """
    given = Path(os.path.expanduser(path))  # unlike Path.expanduser, it keeps the name of an unknown user
    if given.parts[:1] in [(folder,) for folder in FOLDERS] and ".." not in given.parts and not given.exists():
        shipped = shipped_root() / given
        if shipped.is_file():
            return shipped
    return given
