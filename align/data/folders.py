"""Selection of the files of a folder: its subsets, its splits, and files with the same rows in several formats.

A folder is laid out as a data set of the hub: `configs` in the YAML block of its README name the files of each subset, as in
`datasets`. Without them, each folder inside it is a subset. Folders written by `save_to_disk` are loaded with `datasets`.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from align.core.errors import UserError, counted, first_line, nearest_name_hint
from align.data.source_files import ENDINGS, KINDS_OF_FILES, SourceRow, file_rows, numbered, renamed

logger = logging.getLogger(__name__)
# Metadata files in a `datasets` folder or a clone of a Hub repository.
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SAVED = ("dataset_dict.json", "state.json")
"""Files that mark a folder of `save_to_disk`."""
SPLIT_NAMES = {"train", "validation", "valid", "val", "dev", "test", "eval"}
NO_SUBSETS = SPLIT_NAMES | {"data", "json", "jsonl", "csv", "tsv", "parquet", "default"}
"""Names of folders for splits or formats of one data set."""
SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5,}\..*")
SHARD_NUMBER = re.compile(r"-\d{5}-of-\d{5,}")
MOST_NAMES = 8


class FolderPart(NamedTuple):
    """The requested part of a folder: the options `subset` and `split` of a source."""

    subset: str | None
    split: str
    names_split: bool
    """Whether the source names the split; otherwise files and data sets without splits are read."""


def folder_rows(folder: Path, label: str, part: FolderPart, columns: Mapping[str, str]) -> Iterator[SourceRow]:
    """Yield the rows of a part of a folder.

    Args:
        label: folder name for messages.
        columns: see `renamed`.

    Raises:
        UserError: if the folder does not have the subset or the split.
    """
    if _is_saved(folder):
        if part.subset is not None:
            raise UserError(f"{label}: no subset '{part.subset}': a folder saved by `datasets` has none; remove subset")
        yield from renamed(_saved_rows(folder, label, part), columns)
        return
    configs = _readme_configs(folder, label)
    if configs:
        wanted = _files_of_config(folder, label, configs, part)
    else:
        saved = {path.parent for name in SAVED for path in folder.rglob(name)}
        saved = {path for path in saved if saved.isdisjoint(path.parents)}
        if saved:
            subset = _choose_saved(folder, label, saved, part)
            yield from folder_rows(
                subset, str(Path(label) / subset.relative_to(folder)), part._replace(subset=None), columns
            )
            return
        wanted = _files_of_folder(folder, label, part)
    for path in wanted:
        yield from file_rows(path, str(Path(label) / path.relative_to(folder)), columns)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in SAVED)


@cache
def _warn(message: str) -> None:
    """Log a warning once, on the first process: a source may be read several times."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", message)


def _listed(names: Any) -> str:
    names = sorted(map(str, names))
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


# ------------------------------------------------------------------------------------------------------ files by their paths


def _files_of_folder(folder: Path, label: str, part: FolderPart) -> list[Path]:
    files = [path for path in sorted(folder.rglob("*")) if _is_data(path, folder)]
    if not files:
        raise UserError(f"{label}: no data files in the folder; supported file types: {KINDS_OF_FILES}")
    subsets = {path: _subsets_of(path, folder) for path in files}
    names = set().union(*subsets.values())
    if part.subset is not None:
        files = [path for path in files if part.subset in path.relative_to(folder).parts[:-1]]
        if not files:
            known = f"it has {_listed(names)}" if names else "it has none; remove subset"
            raise UserError(f"{label}: no subset '{part.subset}'{nearest_name_hint(part.subset, names) or f'; {known}'}")
    wanted = _files_of_split(files, folder, label, part)
    read = set().union(*(subsets[path] for path in wanted))
    if part.subset is None and len(read) > 1:
        _warn(f"{label}: reading the subsets {_listed(read)}; use {label}[subset=NAME] to read one")
    return _in_one_form(wanted, folder, label)


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith(".") for part in parts)
    return path.is_file() and not hidden and path.name not in NOT_DATA and path.name.lower().endswith(ENDINGS)


def _subsets_of(path: Path, folder: Path) -> set[str]:
    """Return the first folder on the path of a file that is not named after a split or a format."""
    return set(islice((name for name in path.relative_to(folder).parts[:-1] if name.lower() not in NO_SUBSETS), 1))


def _files_of_split(files: list[Path], folder: Path, label: str, part: FolderPart) -> list[Path]:
    """Return the files whose paths name the split; if none does, the training data: files that name no split."""
    split = part.split.lower()
    splits = {path: _splits_of(path, folder, split) for path in files}
    of_split, of_none = [path for path in files if split in splits[path]], [path for path in files if not splits[path]]
    if of_split:
        if of_none:
            names = _listed(path.relative_to(folder) for path in of_none)
            _warn(f"{label}: skipped {counted(len(of_none), 'file')} without a split in the name: {names}")
        return of_split
    if of_none and (not part.names_split or split == "train"):
        return of_none
    available = _listed(set().union(*splits.values()) | ({"train"} if of_none else set()))
    raise UserError(f"{label}: no files of the split '{part.split}'; the folder has {available}")


def _splits_of(path: Path, folder: Path, asked: str) -> set[str]:
    """Return the splits named in a file's path inside its folder, such as the one `asked` for. May be empty.

    A shard, such as `data/train_prefs-00000-of-00001.parquet`, belongs only to the split `train_prefs`, as in `datasets`.
    """
    words = set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower())) | {path.name.lower().split(".")[0]}
    shard = SHARD.fullmatch(path.name.lower())
    if shard and SPLIT_NAMES & set(shard[1].split("_")):
        return {shard[1]}
    return words & (SPLIT_NAMES | {asked})


def _in_one_form(files: list[Path], folder: Path, label: str) -> list[Path]:
    """Drop files that repeat the rows of others in another format, such as `train.parquet` beside `train.jsonl`.

    Files hold the same rows if their names differ only in the ending, or if their first rows are equal. All shards of one
    format count together.
    """
    forms: dict[tuple[Path, str, str], list[Path]] = {}
    for path in files:
        stem, ending = _stem_and_ending(path)
        forms.setdefault((path.parent, SHARD_NUMBER.sub("", stem), ending), []).append(path)
    if len({ending for _, _, ending in forms}) < 2:
        return files
    kept: list[tuple[str, set[tuple[str, ...]], set[object]]] = []  # extension, stems and first rows of each format
    left_out: list[Path] = []
    for (_, _, ending), paths in sorted(forms.items(), key=lambda form: ENDINGS.index(form[0][2])):
        places = {(*_subsets_of(path, folder), _stem_and_ending(path)[0]) for path in paths}
        rows = {_first_row(paths[0])} - {None}
        if any(ending != other and (places & known or rows & first) for other, known, first in kept):
            left_out += paths
        else:
            kept.append((ending, places, rows))
    if left_out:
        names = _listed(path.relative_to(folder) for path in left_out)
        _warn(
            f"{label}: skipped {counted(len(left_out), 'file')} that repeat rows of other files in another format: {names}"
        )
    return [path for path in files if path not in left_out]


def _stem_and_ending(path: Path) -> tuple[str, str]:
    name = path.name.lower()
    ending = max((ending for ending in ENDINGS if name.endswith(ending)), key=len)
    return name.removesuffix(ending), ending


def _first_row(path: Path) -> object:
    """Return the first row of a file in a format-independent form, or None if it cannot be read."""
    try:
        row = next(iter(file_rows(path, path.name, {}))).row
    except (UserError, StopIteration):
        return None
    if not isinstance(row, Mapping):
        return None
    values = {str(name): value if isinstance(value, str) else json.dumps(value, default=str) for name, value in row.items()}
    return frozenset((name, text) for name, text in values.items() if text not in ("", "null"))


# ---------------------------------------------------------------------------------------- `configs` in the README of a clone


def _readme_configs(folder: Path, label: str) -> list[dict[str, Any]]:
    """Return the entries of `configs` in the YAML block at the start of README.md. Empty if there are none."""
    path = folder / "README.md"
    if not path.is_file():
        return []
    block = re.match(
        r"\A\ufeff?---\s*\n(.*?)\n---\s*(?:\n|\Z)", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL
    )
    if block is None:
        return []
    try:
        metadata = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        raise UserError(
            f"{label}/README.md: invalid YAML ({first_line(error)}); fix it or pass the files directly"
        ) from error
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    if not isinstance(configs, list):
        return []
    return [{"config_name": "default", **config} for config in configs if isinstance(config, dict)]


def _files_of_config(folder: Path, label: str, configs: list[dict[str, Any]], part: FolderPart) -> list[Path]:
    names = [str(config["config_name"]) for config in configs]
    if part.subset is not None:
        chosen = [config for config, name in zip(configs, names, strict=True) if name == part.subset]
        if not chosen:
            hint = nearest_name_hint(part.subset, names) or f"; its README has {', '.join(names)}"
            raise UserError(f"{label}: no subset '{part.subset}'{hint}")
    else:
        defaults = [c for c, name in zip(configs, names, strict=True) if c.get("default") is True or name == "default"]
        chosen = defaults or configs
        if len(configs) > 1 and not defaults:
            raise UserError(f"{label}: contains the subsets {', '.join(names)}; choose one: {label}[subset={names[0]}]")
    config = chosen[0]
    patterns = _patterns(config.get("data_files"))
    base = folder / str(config.get("data_dir") or ".")
    if not patterns:
        files = [path for path in sorted(base.rglob("*")) if _is_data(path, folder)]
        if not files:
            raise UserError(f"{label}: no files of the subset '{config['config_name']}' found; download the data files")
        return _in_one_form(_files_of_split(files, folder, label, part), folder, label)
    if part.split not in patterns:
        raise UserError(f"{label}: no split '{part.split}'; its README has {', '.join(patterns)}")
    return _glob(base, label, patterns[part.split])


def _patterns(data_files: object) -> dict[str, list[str]]:
    """Return the file patterns of each split. Files without a split hold the training data."""
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else []:
        entry = entry if isinstance(entry, dict) else {"path": entry}
        paths = entry.get("path") or []
        paths = [paths] if isinstance(paths, str) else paths
        patterns.setdefault(str(entry.get("split", "train")), []).extend(map(str, paths))
    return patterns


def _glob(base: Path, label: str, patterns: list[str]) -> list[Path]:
    files: dict[Path, None] = {}
    for pattern in patterns:
        if "://" in pattern or pattern.startswith("/") or ".." in Path(pattern).parts:
            raise UserError(f"{label}: its README refers to {pattern}, which is outside the folder; pass the files directly")
        deep = f"{pattern}/*" if pattern.endswith("**") else pattern  # `**` by itself matches only folders
        matches = sorted(path for path in base.glob(deep) if path.is_file())
        if not matches:
            raise UserError(f"{label}: its README refers to {pattern}, but there is no such file; download the data files")
        files |= dict.fromkeys(matches)
    return list(files)


# ------------------------------------------------------------------------------------------------- folders of `save_to_disk`


def _choose_saved(folder: Path, label: str, saved: set[Path], part: FolderPart) -> Path:
    """Return the saved data set inside a folder that the subset names."""
    names = {str(path.relative_to(folder)): path for path in saved}
    if part.subset is None:
        raise UserError(f"{label}: contains the data sets {_listed(names)}; choose one: {label}[subset={min(names)}]")
    if part.subset not in names:
        raise UserError(f"{label}: no subset '{part.subset}'; it has {_listed(names)}")
    return names[part.subset]


def _saved_rows(folder: Path, label: str, part: FolderPart) -> Iterator[SourceRow]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        wrong = f"not a valid `datasets` folder ({first_line(error)})"
        raise UserError(f"{label}: {wrong}; save it with save_to_disk again") from error
    if isinstance(saved, datasets.DatasetDict):
        if part.split not in saved:
            raise UserError(f"{label}: no split '{part.split}'; the folder has {', '.join(saved)}")
        return numbered(saved[part.split], label)
    if part.names_split and str(saved.split) != part.split:
        name = "no splits" if saved.split is None else f"the split '{saved.split}' alone"
        raise UserError(f"{label}: no split '{part.split}'; the folder has {name}; remove split")
    return numbered(saved, label)
