"""Rows of a file: JSON Lines, JSON arrays, text lines, CSV, Excel, Parquet; optionally compressed with gzip or Zstandard.

A row that cannot be decoded is returned as a bad row, and the caller decides whether to stop. A file that cannot be read
raises a UserError immediately.
"""

import codecs
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from align.core.errors import UserError, first_line, short_repr
from align.data.tables import csv_rows, excel_rows, read_cell, rename

COMPRESSED = ("", ".gz", ".zst")
JSON_ENDINGS = tuple(f"{ending}{packed}" for packed in COMPRESSED for ending in (".jsonl", ".json", ".ndjson"))
CSV_ENDINGS = tuple(f"{ending}{packed}" for packed in COMPRESSED for ending in (".csv", ".tsv"))
ENDINGS = (*JSON_ENDINGS, *CSV_ENDINGS, ".xlsx", ".parquet")
TEXT_ENDING = ".txt"  # prompts; ignored in folders because it may be a license
KINDS_OF_FILES = ".jsonl, .json, .ndjson, .csv or .tsv (also with .gz or .zst), .xlsx, .parquet"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class SourceRow(NamedTuple):
    """A row and its location (`FILE:LINE` or `FILE: row N`, from 1). An invalid row is represented by its `UserError`."""

    where: str
    row: Any


def renamed(rows: Iterable[SourceRow], columns: Mapping[str, str], of_cells: bool = False) -> Iterator[SourceRow]:
    """Rename columns to fields. A row without a mapped column is a bad row.

    Args:
        of_cells: whether the values are strings from table cells.
    """
    for where, row in rows:
        if isinstance(row, Mapping):
            try:
                row = rename(row, columns) if columns else row
                row = {field: read_cell(field, cell) for field, cell in row.items()} if of_cells else row
            except UserError as error:
                row = error
        yield SourceRow(where, row)


def numbered(rows: Iterable[Any], label: str) -> Iterator[SourceRow]:
    """Add row numbers, from 1, as locations."""
    return (SourceRow(f"{label}: row {number}", row) for number, row in enumerate(rows, 1))


def file_rows(path: Path, label: str, columns: Mapping[str, str]) -> Iterator[SourceRow]:
    """Yield the rows of a file.

    Args:
        label: file name for messages.
        columns: see `renamed`.
    """
    name = path.name.lower()
    if not name.endswith((*ENDINGS, TEXT_ENDING)):
        kinds = f"{KINDS_OF_FILES}, or {TEXT_ENDING} for prompts, one per line"
        raise UserError(f"{label}: unknown file type; use {kinds}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{label}: the file is empty; write one record per line")
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"{label}: is a Git LFS pointer; run `git lfs pull` in its clone")
        if name.endswith(".parquet"):
            yield from renamed(_parquet_rows(path, label), columns)
        elif name.endswith(".xlsx"):
            yield from renamed(numbered(excel_rows(path, label), label), columns, of_cells=True)
        else:
            with _opened(path, label) as stream:
                is_table = name.endswith(CSV_ENDINGS)
                lines = None if is_table else _line_rows(stream, label, is_json=not name.endswith(TEXT_ENDING))
                yield from renamed(lines or numbered(csv_rows(stream, label), label), columns, is_table)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{label}: corrupt gzip file ({error}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror or error}); check the file") from error


@contextmanager
def _opened(path: Path, label: str) -> Iterator[IO[bytes]]:
    """Open a file, decompressing it if needed."""
    name = path.name.lower()
    if not name.endswith(".zst"):
        with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as opened:
            yield cast(IO[bytes], opened)
        return
    import pyarrow as pa

    with path.open("rb"):  # pyarrow does not report missing permissions clearly
        stream = pa.input_stream(str(path), compression="zstd")
    try:
        yield cast(IO[bytes], io.BufferedReader(stream))
    except OSError as error:
        raise UserError(f"{label}: corrupt Zstandard file ({first_line(error)}); copy or compress it again") from error


def _line_rows(stream: IO[bytes], label: str, is_json: bool) -> Iterator[SourceRow]:
    """Yield a JSON value per line or array entry, or a prompt per text line."""
    # Split on b"\n" only: str.splitlines would also split at U+2028, which JSON allows in strings.
    seen_content = False
    for number, line in enumerate(stream, 1):
        if number == 1:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
                raise UserError(f"{label}: encoded as UTF-16; save it as UTF-8")
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if is_json and not seen_content and line.lstrip().startswith(b"["):
            try:
                yield from numbered(_decode((line + stream.read()).decode("utf-8")), label)
            except (ValueError, RecursionError) as error:
                place = number + getattr(error, "lineno", 1) - 1
                raise UserError(f"{label}:{place}: {_decoding_problem(error)}") from error
            return
        seen_content = True
        row: Any
        try:
            text = line.decode("utf-8").strip("\r\n")
            if text.isspace():
                continue
            row = _decode(text) if is_json else {"prompt": text}
        except (ValueError, RecursionError) as error:
            row = UserError(_decoding_problem(error))
        yield SourceRow(f"{label}:{number}", row)


def _decode(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_with_each_name_once)


def _with_each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate key {short_repr(twice)}")
    return items


def _decoding_problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start + 1}); save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON ({error.msg}, column {error.colno}); write one JSON object per line"
    return f"invalid JSON ({error}); write one JSON object per line"


def _parquet_rows(path: Path, label: str) -> Iterator[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1000)
            yield from numbered((row for batch in batches for row in batch.to_pylist()), label)
    except pa.ArrowException as error:
        raise UserError(f"{label}: invalid Parquet file ({first_line(error)}); write it again") from error
