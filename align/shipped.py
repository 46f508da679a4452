"""The files that come with the package: configs/, data/ and forms/ of the repository; in a wheel, align/_shipped/."""

from importlib.resources import files
from pathlib import Path

FOLDERS = ("configs", "data", "forms")


def shipped_root() -> Path:
    """The folder that holds configs/, data/ and forms/: in the installed package, or the root of a checkout."""
    package = Path(str(files("align")))
    installed = package / "_shipped"
    return installed if installed.is_dir() else package.parent


def resolve_path(path: str | Path) -> Path:
    """The file or folder that a path in settings means.

    A path means what is there, seen from the working directory. Only where nothing is there, and the path is that of a
    shipped file (`data/prompts.jsonl`, `configs/eval/all.yaml`), it means the shipped file: the defaults work in any folder,
    and a file of the user's own with the same path comes first.

    Returns:
        The path, with ~ expanded; it need not exist.
    """
    given = Path(path).expanduser()
    if given.parts[:1] in [(folder,) for folder in FOLDERS] and ".." not in given.parts and not given.exists():
        shipped = shipped_root() / given
        if shipped.is_file():
            return shipped
    return given
