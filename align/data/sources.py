"""Readers of rows from JSON, CSV and Parquet files, folders, `datasets` folders and the hub, without knowledge of layouts.

A row that cannot be decoded is returned as a bad row: the caller decides whether to stop. A file that cannot be read at all
is a UserError at once.
"""

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from align.core.errors import UserError, first_line
from align.core.files import resolve_path

JSON_ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
CSV_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ENDINGS = (*JSON_ENDINGS, *CSV_ENDINGS, ".parquet")
# What a `datasets` folder or a clone of a hub repository keeps next to its rows.
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
OTHER_ENDINGS = (".gz", ".txt", ".xlsx", ".zip", ".zst", ".yaml")  # files that cannot be read here
SPLIT_NAMES = {"train", "validation", "valid", "val", "dev", "test", "eval"}
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row and its location (`FILE:LINE` or `FILE: row N`, from 1). A broken row has `error` instead of `row`."""

    where: str
    row: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before parsing, for skipping rows cheaply.

    Attributes:
        content: a line of JSON, or the row itself from a file of another kind, as a `SourceRow` if it is broken.
    """

    where: str
    content: Any

    def read(self) -> SourceRow:
        if isinstance(self.content, SourceRow):
            return self.content
        if not isinstance(self.content, bytes):
            return SourceRow(self.where, row=self.content)
        try:
            return SourceRow(self.where, row=json.loads(self.content.rstrip().decode("utf-8")))
        except (ValueError, RecursionError) as error:
            return SourceRow(self.where, error=_json_error_message(error))


def split_sources(sources: str | Path) -> list[str]:
    """The names in a list of sources that are separated by commas. An existing path with commas is one source."""
    sources = str(sources)
    if resolve_path(sources).exists():
        return [sources]
    return [name for part in sources.split(",") if (name := part.strip())] or [sources]


def iter_rows(sources: str | Path, split: str = "train") -> Iterator[SourceRow]:
    """The rows of a file, a folder or a hub data set, or of several, one after the other.

    Args:
        sources: the path, or the name of a hub data set; several are separated by commas.
        split: for folders and hub names.

    Raises:
        UserError: for a missing, unreadable, damaged or unknown kind of file, and for a missing split.
    """
    for raw in iter_raw_rows(sources, split):
        yield raw.read()


def iter_raw_rows(sources: str | Path, split: str = "train") -> Iterator[RawRow]:
    """`iter_rows`, unparsed."""
    for source in split_sources(sources):
        yield from _rows_of_source(source, split)


def _rows_of_source(source: str, split: str) -> Iterator[RawRow]:
    path = resolve_path(source)
    if path.is_dir():
        yield from _folder_rows(path, source, split)
    elif path.exists():
        yield from _file_rows(path, source)
    else:
        yield from _hub_rows(source, split)


def _file_rows(path: Path, label: str) -> Iterator[RawRow]:
    name = path.name.lower()
    if not name.endswith(ENDINGS):
        raise UserError(f"{label}: unknown kind of file; use one that ends in {', '.join(ENDINGS)}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{label}: the file is empty; write one record per line")
        if name.endswith(".parquet"):
            yield from _parquet_rows(path, label)
        else:
            with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as stream:
                read = _csv_file_rows if name.endswith(CSV_ENDINGS) else _json_rows
                yield from read(stream, label)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{label}: broken gzip file ({error}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror or error}); check the file") from error


def _json_rows(stream: IO[bytes], label: str) -> Iterator[RawRow]:
    # Lines are split on b"\n" alone: str.splitlines would also cut at U+2028, which JSON allows in strings.
    seen_content = False
    for number, line in enumerate(stream, 1):
        if number == 1:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{label}: is UTF-16; save it as UTF-8")
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if not seen_content and line.lstrip().startswith(b"["):
            yield from _array_rows(line + stream.read(), label, number)
            return
        seen_content = True
        yield RawRow(f"{label}:{number}", line)


def _csv_file_rows(stream: IO[bytes], label: str) -> Iterator[RawRow]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")  # Excel begins UTF-8 with a byte order mark
    try:
        for number, row in enumerate(csv_rows(text, label), 1):
            where = f"{label}: row {number}"
            yield RawRow(where, SourceRow(where, error=row) if isinstance(row, str) else row)
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as CSV UTF-8") from error


def _array_rows(text: bytes, label: str, number_of_first_line: int) -> Iterator[RawRow]:
    try:
        rows = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        line = number_of_first_line + getattr(error, "lineno", 1) - 1
        raise UserError(f"{label}:{line}: {_json_error_message(error)}") from error
    for number, row in enumerate(rows, 1):
        yield RawRow(f"{label}: row {number}", row)


def _json_error_message(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start + 1}); save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON ({error.msg}, column {error.colno}); write one JSON object per line"
    return f"broken JSON ({error}); write one JSON object per line"


def _parquet_rows(path: Path, label: str) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{label}: row {number}", row)
    except pa.ArrowException as error:
        raise UserError(f"{label}: not a readable Parquet file ({first_line(error)}); write it again") from error


def _folder_rows(folder: Path, label: str, split: str) -> Iterator[RawRow]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        yield from _saved_rows(folder, label, split)
        return
    files = [path for path in sorted(folder.rglob("*")) if _is_data(path, folder)]
    if not files:
        raise UserError(f"{label}: the folder has no data files; it needs files ending in {', '.join(ENDINGS)}")
    splits = {path: _path_words(path, folder) & (SPLIT_NAMES | {split.lower()}) for path in files}
    wanted = [path for path in files if split.lower() in splits[path]]
    if not wanted:
        wanted = [path for path in files if not splits[path]]
    if not wanted:
        available = ", ".join(sorted(set().union(*splits.values())))
        raise UserError(f"{label}: no file of the split '{split}'; the folder has {available}")
    for path in wanted:
        yield from _file_rows(path, str(Path(label) / path.relative_to(folder)))


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith(".") for part in parts)
    return path.is_file() and not hidden and path.name not in NOT_DATA and path.name.lower().endswith(ENDINGS)


def _path_words(path: Path, folder: Path) -> set[str]:
    """The words of a file's path inside its folder: `data/train-00000-of-00001.parquet` has the word `train`."""
    return set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower())) | {path.name.lower().split(".")[0]}


def _saved_rows(folder: Path, label: str, split: str) -> Iterator[RawRow]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        wrong = f"not a readable `datasets` folder ({first_line(error)})"
        raise UserError(f"{label}: {wrong}; save it again with save_to_disk") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise UserError(f"{label}: no split '{split}'; the folder has {', '.join(saved)}")
        saved = saved[split]
    for number, row in enumerate(saved, 1):
        yield RawRow(f"{label}: row {number}", row)


def _hub_rows(name: str, split: str) -> Iterator[RawRow]:
    missing = f"{name}: no such file or folder"
    if not HUB_NAME.fullmatch(name) or name.lower().endswith((*ENDINGS, *OTHER_ENDINGS)):
        raise UserError(f"{missing}; check the path")
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:
        # `datasets` raises ConnectionError for network failures; FileNotFoundError means that the hub answered.
        unreachable = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        why = "could not be reached" if unreachable else "has no data set of that name that could be loaded"
        remedy = "check the path, or the name and the network"
        raise UserError(f"{missing} here, and the hub {why} ({first_line(error)}); {remedy}") from error
    for number, row in enumerate(rows, 1):
        yield RawRow(f"{name}: row {number}", row)


STRUCTURED = {
    "messages", "responses", "ranks", "ratings", "preferences", "flags", "margin", "attributes", "answers", "completions",
    "labels", "label", "kto_tag", "weight", "train", "score_chosen", "score_rejected",
    "history", "input_ids", "attention_mask", "tools", "images",
}  # fmt: skip
"""Columns whose cells are JSON: numbers, truth values, lists, objects."""
TURNS = frozenset(("prompt", "completion", "chosen", "rejected"))
"""Columns whose cells are text, or a JSON list of turns."""
SEPARATORS = ",;\t"


def csv_rows(text: IO[str], label: str) -> Iterator[dict[str, Any] | str]:
    """The rows below the header of a CSV file, as spreadsheets and pandas write them, or error messages.

    Cells are text, but for the columns in `STRUCTURED`. The separator is the comma, semicolon or tab that the header holds
    most of. An empty cell counts as absent, and so does a column without a name, in which pandas writes the index.

    Args:
        text: the file, opened with `newline=""`.
        label: its name, for messages.

    Raises:
        UserError: for a header with a name twice, or broken quotes.
    """
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is shorter than a long document
    start = text.readline()
    separator = max(SEPARATORS, key=start.count)
    try:
        header = next(csv.reader([start], delimiter=separator, strict=True), [])
        names = [name.strip() for name in header]
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{label}: the header has the column '{twice}' twice; rename one")
        for cells in csv.reader(text, delimiter=separator, strict=True):
            if not cells:
                continue
            if len(cells) != len(names):
                yield f"has {len(cells)} cells, and the header has {len(names)}; put cells with '{separator}' in quotes"
                continue
            yield {name: _value(name, cell) for name, cell in zip(names, cells, strict=True) if name and cell}
    except csv.Error as error:
        raise UserError(f"{label}: broken CSV ({error}); write it again, with quotes inside of cells doubled") from error


def _value(name: str, cell: str) -> Any:
    is_turns = name in TURNS and cell.lstrip().startswith("[{")
    if name not in STRUCTURED and not is_turns:
        return cell
    try:
        return json.loads(cell.lower() if cell in ("True", "False") else cell)
    except (ValueError, RecursionError):
        return cell  # a check of the row names what is wrong with it
