"""Readers of rows from files, folders, `datasets` folders and the hub, without knowledge of layouts.

A source is a path or a hub name, with options in brackets if needed: `answers.csv[prompt=question, response_a=first]` reads
columns as fields, and `org/name[subset=preference, split=test]` names a part of a hub data set.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from align.core.errors import UserError, first_line, nearest_name_hint, short_repr
from align.core.files import resolve_path
from align.core.hub import require_hub
from align.core.plugins import install_hint
from align.data.fields import SCORES

JSON_ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
CSV_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ENDINGS = (*JSON_ENDINGS, *CSV_ENDINGS, ".xlsx", ".parquet")
TEXT_ENDING = ".txt"  # a file of prompts; not looked for in folders, where it may be a license
# What a `datasets` folder or a clone of a hub repository keeps next to its rows.
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
OTHER_ENDINGS = (".gz", ".xls", ".ods", ".zip", ".zst", ".yaml")  # files that cannot be read here
SPLIT_NAMES = {"train", "validation", "valid", "val", "dev", "test", "eval"}
SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5,}\..*")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
OPTIONS = re.compile(r"(?P<name>[^\[\]]+)\[(?P<options>[^\[\]]*)\]\s*")


class SourceRow(NamedTuple):
    """One row and its location (`FILE:LINE` or `FILE: row N`, from 1). In place of a broken row stands its `UserError`."""

    where: str
    row: Any


def split_sources(sources: str | Path) -> list[str]:
    """The names in a list of sources that are separated by commas. An existing path with commas is one source."""
    sources = str(sources)
    if resolve_path(sources).exists():
        return [sources]
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^,])+", sources)  # commas in brackets separate options
    return [name for part in parts if (name := part.strip())] or [sources]


def _split_options(source: str) -> tuple[str, dict[str, str]]:
    """Separate a source from its options. An existing path with brackets has none."""
    match = OPTIONS.fullmatch(source)
    if match is None or resolve_path(source).exists():
        return source, {}
    options: dict[str, str] = {}
    for part in match["options"].split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise UserError(f"{source}: '{part.strip()}' is no option; write [FIELD=COLUMN, ...], such as [prompt=question]")
        if name in options:
            raise UserError(f"{source}: {name} is given twice; remove one")
        options[name] = value
    return match["name"].strip(), options


def iter_rows(sources: str | Path, split: str = "train") -> Iterator[SourceRow]:
    """The rows of a file, a folder or a hub data set, or of several, one after the other.

    Args:
        sources: the path, or the name of a hub data set, with options in brackets; several are separated by commas.
        split: for folders and hub names without this option.
    """
    for source in split_sources(sources):
        name, columns = _split_options(source)
        given = {option: columns.pop(option) for option in ("split", "subset") if option in columns}
        path, split_of_source = resolve_path(name), given.get("split", split)
        if path.is_dir():
            yield from _folder_rows(path, name, split_of_source, columns)
        elif path.exists():
            for option, value in given.items():
                raise UserError(f"{source}: a file has no {option}; leave {option}={value} out, or rename the column")
            yield from _file_rows(path, name, columns)
        else:
            yield from _renamed(_hub_rows(name, split_of_source, given.get("subset")), columns)


def _renamed(rows: Iterable[SourceRow], columns: Mapping[str, str], of_cells: bool = False) -> Iterator[SourceRow]:
    """Rows with the columns named by `columns` under the names of their fields; a row without such a column is a bad row.

    Args:
        of_cells: the values are texts in cells of a table.
    """
    for where, row in rows:
        if isinstance(row, Mapping):
            try:
                row = rename(row, columns) if columns else row
                row = {field: read_cell(field, cell) for field, cell in row.items()} if of_cells else row
            except UserError as error:
                row = error
        yield SourceRow(where, row)


def _numbered(rows: Iterable[Any], label: str) -> Iterator[SourceRow]:
    return (SourceRow(f"{label}: row {number}", row) for number, row in enumerate(rows, 1))


def _file_rows(path: Path, label: str, columns: Mapping[str, str]) -> Iterator[SourceRow]:
    name = path.name.lower()
    if not name.endswith((*ENDINGS, TEXT_ENDING)):
        kinds = f"{', '.join(ENDINGS)}, or {TEXT_ENDING} for prompts, one per line"
        raise UserError(f"{label}: unknown kind of file; use one that ends in {kinds}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{label}: the file is empty; write one record per line")
        if name.endswith(".parquet"):
            yield from _renamed(_parquet_rows(path, label), columns)
        elif name.endswith(".xlsx"):
            yield from _renamed(_numbered(excel_rows(path, label), label), columns, of_cells=True)
        else:
            with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as opened:
                stream, is_table = cast(IO[bytes], opened), name.endswith(CSV_ENDINGS)
                lines = None if is_table else _line_rows(stream, label, is_json=not name.endswith(TEXT_ENDING))
                yield from _renamed(lines or _numbered(csv_rows(stream, label), label), columns, is_table)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{label}: broken gzip file ({error}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror or error}); check the file") from error


def _line_rows(stream: IO[bytes], label: str, is_json: bool) -> Iterator[SourceRow]:
    """A JSON value of each line, or of each entry of a JSON array; or a prompt for each line of text."""
    # Lines are split on b"\n" alone: str.splitlines would also cut at U+2028, which JSON allows in strings.
    seen_content = False
    for number, line in enumerate(stream, 1):
        if number == 1:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
                raise UserError(f"{label}: is UTF-16; save it as UTF-8")
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if is_json and not seen_content and line.lstrip().startswith(b"["):
            try:
                yield from _numbered(_decode((line + stream.read()).decode("utf-8")), label)
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
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {short_repr(twice)} is there twice in an object")
    return found


def _decoding_problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start + 1}); save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON ({error.msg}, column {error.colno}); write one JSON object per line"
    return f"broken JSON ({error}); write one JSON object per line"


def _parquet_rows(path: Path, label: str) -> Iterator[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1000)
            yield from _numbered((row for batch in batches for row in batch.to_pylist()), label)
    except pa.ArrowException as error:
        raise UserError(f"{label}: not a readable Parquet file ({first_line(error)}); write it again") from error


def _folder_rows(folder: Path, label: str, split: str, columns: Mapping[str, str]) -> Iterator[SourceRow]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        yield from _renamed(_saved_rows(folder, label, split), columns)
        return
    files = [path for path in sorted(folder.rglob("*")) if _is_data(path, folder)]
    if not files:
        raise UserError(f"{label}: the folder has no data files; it needs files ending in {', '.join(ENDINGS)}")
    splits = {path: _splits_of(path, folder, split.lower()) for path in files}
    wanted = [path for path in files if split.lower() in splits[path]] or [path for path in files if not splits[path]]
    if not wanted:
        available = ", ".join(sorted(set().union(*splits.values())))
        raise UserError(f"{label}: no file of the split '{split}'; the folder has {available}")
    for path in wanted:
        yield from _file_rows(path, str(Path(label) / path.relative_to(folder)), columns)


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith(".") for part in parts)
    return path.is_file() and not hidden and path.name not in NOT_DATA and path.name.lower().endswith(ENDINGS)


def _splits_of(path: Path, folder: Path, asked: str) -> set[str]:
    """The splits that a file's path inside its folder names, which may be the one `asked` for; empty: it names none.

    A shard, such as `data/train_prefs-00000-of-00001.parquet`, is of the split `train_prefs` alone, as in `datasets`.
    """
    words = set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower())) | {path.name.lower().split(".")[0]}
    shard = SHARD.fullmatch(path.name.lower())
    if shard and SPLIT_NAMES & set(shard[1].split("_")):
        return {shard[1]}
    return words & (SPLIT_NAMES | {asked})


def _saved_rows(folder: Path, label: str, split: str) -> Iterator[SourceRow]:
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
    return _numbered(saved, label)


def _hub_rows(name: str, split: str, subset: str | None) -> Iterator[SourceRow]:
    missing = f"{name}: no such file or folder"
    if not HUB_NAME.fullmatch(name) or name.lower().endswith((*ENDINGS, TEXT_ENDING, *OTHER_ENDINGS)):
        raise UserError(f"{missing}; check the path")
    require_hub(name, "dataset")
    import datasets

    try:
        rows = datasets.load_dataset(name, *([subset] if subset else []), split=split)
    except Exception as error:
        # `datasets` raises ConnectionError for network failures; FileNotFoundError means that the hub answered.
        unreachable = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        why = "could not be reached" if unreachable else "has no data set of that name that could be loaded"
        remedy = "check the path, or the name and the network"
        raise UserError(f"{missing} here, and the hub {why} ({first_line(error)}); {remedy}") from error
    return _numbered(rows, name)


# ----------------------------------------------------------------------------------- rows of CSV files and of Excel sheets


STRUCTURED = {
    "messages", "responses", "ranks", "ratings", "rating", "preferences", "flags", "margin", "attributes", "answers",
    "completions", "labels", "label", "kto_tag", "weight", "train", "helpfulness", "preference_strength",
    "overall_preference", "choice", "better_response_id", "score_0", "score_1", "conversations", "conversation", "history",
    "input_ids", "attention_mask", "tools", "images", *(name for pair in SCORES for name in pair),
}  # fmt: skip
"""Fields whose cells are JSON: numbers, truth values, lists, objects."""
TURNS = frozenset(("prompt", "completion", "chosen", "rejected"))
"""Fields whose cells are text, or a JSON list of turns."""
SEPARATORS = ",;\t"


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the columns that `columns` names by field under the names of their fields, in place of any there."""
    for column in columns.values():
        if column not in row:
            known = [str(name) for name in row]
            hint = nearest_name_hint(column, known) or f"; it has {', '.join(known) or 'none'}"
            raise UserError(f"no column '{column}'{hint}")
    kept = {name: value for name, value in row.items() if name not in columns.values() and name not in columns}
    return {**kept, **{field: row[column] for field, column in columns.items()}}


def csv_rows(stream: IO[bytes], label: str) -> Iterator[dict[str, str | None] | UserError]:
    """The rows of cells below the header of a CSV file, as spreadsheets and pandas write them, and the errors of bad rows.

    The separator is the comma, semicolon or tab that the header holds most of. `label` is the file's name, for messages.
    """
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is shorter than a long document
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")  # Excel begins UTF-8 with a byte order mark
    line = 1  # where the next row begins
    try:
        start = text.readline()
        if "\0" in start:
            raise UserError(f"{label}: is UTF-16; save it as CSV UTF-8")
        separator = max(SEPARATORS, key=start.count)
        names = _header(next(csv.reader([start], delimiter=separator, strict=True), []), label)
        reader, line = csv.reader(text, delimiter=separator, strict=True), 2
        for cells in reader:
            line = reader.line_num + 2
            if len(cells) == len(names):
                yield _row(names, cells)
            elif cells:
                wrong = f"has {len(cells)} cells, and the header has {len(names)}"
                yield UserError(f"{wrong}; put cells with '{separator}' in quotes")
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as CSV UTF-8") from error
    except csv.Error as error:
        remedy = "write it again, with quotes inside of cells doubled"
        raise UserError(f"{label}:{line}: broken CSV ({error}); {remedy}") from error


def excel_rows(path: Path, label: str) -> Iterator[dict[str, str | None] | UserError]:
    """The rows of cells below the header of the first sheet of an Excel file, and errors, as `csv_rows`.

    A cell counts as the text that it holds: "NA" is no gap, and a number in a column of text is its digits. Formulas have
    the value that was saved with them.
    """
    try:
        from openpyxl import load_workbook
    except ModuleNotFoundError as error:
        remedy = f"save the sheet as CSV UTF-8, or {install_hint('xlsx')}"
        raise UserError(f"{label}: Excel files need openpyxl; {remedy}") from error
    try:
        book = load_workbook(path, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # the size that the file states may be wrong, and rows beyond it would be lost
        found = sheet.iter_rows()
    except Exception as error:  # of zipfile, of the XML parser, or a KeyError for a part that is not there
        raise UserError(f"{label}: not a readable Excel file ({first_line(error)}); save it again as .xlsx") from error
    try:
        names = _header([_cell_text(cell.value) for cell in next(found, ())], label)
        for cells in found:
            broken = next((cell for cell in cells if cell.data_type == "e"), None)
            texts = [_cell_text(cell.value) for cell in cells]
            if broken is not None:
                yield UserError(f"cell {broken.coordinate} is the error {broken.value}; correct the formula")
            elif any(texts[len(names) :]):
                count = max(number for number, text in enumerate(texts, 1) if text)
                wrong = f"has {count} cells, and the header has {len(names)}"
                yield UserError(f"{wrong}; name the columns, or remove the cells")
            elif any(texts):
                yield _row(names, [text for text, _ in zip_longest(texts, names, fillvalue="")])
    finally:
        book.close()


def _header(cells: Sequence[str], label: str) -> list[str]:
    names = [name.strip() for name in cells]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{label}: the header has the column '{twice}' twice; rename one")
    return names


def _row(names: Sequence[str], cells: Sequence[str]) -> dict[str, str | None]:
    """An empty cell is None, and a column without a name, in which pandas writes the index, is left out."""
    return {name: cell or None for name, cell in zip(names, cells, strict=False) if name}


def read_cell(field: str, cell: str | None) -> Any:
    """The value of a cell of a table: its text, or what its JSON holds where the field is no text."""
    is_turns = field in TURNS and cell is not None and cell.lstrip().startswith("[{")
    if cell is None or (field not in STRUCTURED and not is_turns):
        return cell
    try:
        return json.loads(cell.lower() if cell in ("True", "False", "TRUE", "FALSE") else cell)
    except (ValueError, RecursionError):
        return cell  # a check of the row names what is wrong with it


def _cell_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()  # as Excel shows it
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.isoformat() if isinstance(value, datetime | date | time) else str(value)
