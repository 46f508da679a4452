"""Rows of files, folders, `datasets` folders and Hub data sets, independent of layouts.

A source is a path or a hub name, with options in brackets if needed: `answers.csv[prompt=question, response_a=first]` reads
columns as fields, and `org/name[subset=preference, split=test]` names a part of a hub data set.

A row that cannot be decoded is returned as a bad row, and the caller decides whether to stop. A file that cannot be read
raises a UserError immediately.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from align.core.errors import UserError, first_line
from align.core.files import resolve_path
from align.core.hub import require_hub
from align.data.folders import FolderPart, folder_rows
from align.data.source_files import ENDINGS, TEXT_ENDING, SourceRow, file_rows, numbered, renamed

__all__ = ["SourceRow", "field_columns", "iter_rows", "split_sources"]

OTHER_ENDINGS = (".gz", ".xls", ".ods", ".zip", ".zst", ".yaml")  # unsupported file types
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
OPTIONS = re.compile(r"(?P<name>[^\[\]]+)\[(?P<options>[^\[\]]*)\]\s*")
PART_OPTIONS = ("split", "subset")


def split_sources(sources: str | Path) -> list[str]:
    """Split a comma-separated list of sources. An existing path that contains commas is one source."""
    sources = str(sources)
    if resolve_path(sources).exists():
        return [sources]
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^,])+", sources)  # ignore commas inside brackets
    return [name for part in parts if (name := part.strip())] or [sources]


def _split_options(source: str) -> tuple[str, dict[str, str]]:
    """Separate a source from its bracketed options. An existing path with brackets has none."""
    match = OPTIONS.fullmatch(source)
    if match is None or resolve_path(source).exists():
        return source, {}
    options: dict[str, str] = {}
    for part in match["options"].split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise UserError(f"{source}: invalid option '{part.strip()}'; use [FIELD=COLUMN, ...], such as [prompt=question]")
        if name in options:
            raise UserError(f"{source}: {name} is set twice; remove one")
        options[name] = value
    return match["name"].strip(), options


def iter_rows(sources: str | Path, split: str = "train") -> Iterator[SourceRow]:
    """Yield the rows of one or several files, folders or Hub data sets.

    Args:
        sources: the path, or the name of a hub data set, with options in brackets; several are separated by commas.
        split: split of folders and hub data sets without this option.
    """
    for source in split_sources(sources):
        name, columns = _split_options(source)
        options = {option: columns.pop(option) for option in PART_OPTIONS if option in columns}
        part = FolderPart(options.get("subset"), options.get("split", split), "split" in options)
        path = resolve_path(name)
        if path.is_dir():
            yield from folder_rows(path, name, part, columns)
        elif path.exists():
            for option, value in options.items():
                raise UserError(f"{source}: files have no {option}; remove {option}={value}")
            yield from file_rows(path, name, columns)
        else:
            yield from renamed(_hub_rows(name, part.split, part.subset), columns)


def field_columns(sources: str | Path) -> set[str]:
    """Return the fields mapped to columns by the options of sources."""
    return {field for source in split_sources(sources) for field in _split_options(source)[1]} - set(PART_OPTIONS)


def column_names(source: str) -> dict[str, str]:
    """Return the column for each field that the options of a source map."""
    return {field: column for field, column in _split_options(source)[1].items() if field not in PART_OPTIONS}


def _hub_rows(name: str, split: str, subset: str | None) -> Iterator[SourceRow]:
    missing = f"{name}: no such file or folder"
    if not HUB_NAME.fullmatch(name) or name.lower().endswith((*ENDINGS, TEXT_ENDING, *OTHER_ENDINGS)):
        raise UserError(f"{missing}; check the path")
    require_hub(name, "dataset")
    import datasets

    try:
        rows = datasets.load_dataset(name, *([subset] if subset else []), split=split)
    except Exception as error:
        if isinstance(error, ValueError) and re.search("config", str(error), re.IGNORECASE):  # the message lists them
            which = " ".join(str(error).split("Example of usage")[0].split())
            raise UserError(f"{name}: {which}; choose one: {name}[subset=NAME]") from error
        # `datasets` raises ConnectionError for network failures; FileNotFoundError means that the hub responded.
        unreachable = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        why = "could not be reached" if unreachable else "has no loadable data set of that name"
        remedy = "check the path or the network"
        raise UserError(f"{missing}, and the Hub {why} ({first_line(error)}); {remedy}") from error
    return numbered(rows, name)
