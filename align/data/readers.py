"""Reading records from any source in any known layout, and writing them as JSON Lines.

`read_records` is what the stages call; `scan` is the same with all that was found on the way, for `align data check`.
"""

import contextlib
import gzip
import io
import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Generic, TypeVar

from align.data.formats import convert_row, kind_name
from align.data.records import Record
from align.data.sources import iter_rows
from align.errors import UserError

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
LISTED_PROBLEMS = 5


@dataclass(slots=True)
class Scan(Generic[R]):
    """What a source held: records, rows by layout, the number of rows, and a line for each bad one."""

    records: list[R] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    problems: list[str] = field(default_factory=list)


def scan(source: str | os.PathLike[str], kind: type[R], *, stop_at_bad: bool = False, split: str = "train") -> Scan[R]:
    """Read a source to its end, or to its first bad row.

    Errors: UserError for a source that cannot be read, and with `stop_at_bad` for a bad row: "FILE:LINE: ...".
    """
    found: Scan[R] = Scan()
    for row in iter_rows(os.fspath(source), split):
        found.rows += 1
        try:
            if row.error is not None:
                raise UserError(row.error)
            layout, records = convert_row(row.row, kind)
        except UserError as error:
            problem = f"{row.where}: {error}"
            if stop_at_bad:
                raise UserError(problem) from error
            found.problems.append(problem)
        else:
            found.formats[layout.name] += 1
            found.records.extend(records)  # type: ignore[arg-type]
    return found


def read_records(
    source: str | os.PathLike[str], kind: type[R], *, skip_bad_rows: bool = False, split: str = "train"
) -> list[R]:
    """All records of one kind in a source.

    source: a .jsonl, .json, .jsonl.gz, .json.gz or .parquet file; a folder saved by `datasets` or of such files; or,
    where there is no such path, the name of a hub data set. `split` matters for folders and hub names.
    kind: Demonstration, Ranking, RuleJudgment or Prompt; the layout is recognised row by row (`align.data.formats`).
    skip_bad_rows: log the number of bad rows and the first five, and return the others.
    Errors: UserError, one line, for a bad row ("FILE:LINE: field 'ranks': what is wrong; what to do", and
    "FILE: row N: ..." where there are no lines), an unreadable source, or one without a usable record.
    """
    found = scan(source, kind, stop_at_bad=not skip_bad_rows, split=split)
    check_usable(found, source, kind)
    if found.problems:
        logger.warning("%s: skipped %d of %d rows, which are bad:", source, len(found.problems), found.rows)
        for problem in found.problems[:LISTED_PROBLEMS]:
            logger.warning("%s", problem)
    return found.records


def check_usable(found: Scan[R], source: str | os.PathLike[str], kind: type[R]) -> None:
    """Raise a UserError where a source gave no record at all, with the reason."""
    if found.records:
        return
    if not found.rows:
        raise UserError(f"{source}: has no rows; write one record a line")
    if found.problems:
        bad = f"{len(found.problems)} of {found.rows} rows are bad"
        raise UserError(f"{source}: no usable {kind_name(kind)}; {bad}, the first: {found.problems[0]}")
    raise UserError(f"{source}: no usable {kind_name(kind)}; its {found.rows} rows are readable but give none")


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write records as JSON Lines (UTF-8, compressed where the name ends in .gz), all or nothing.

    The bytes go to a temporary file in the same folder, are forced to disk, and take the name in one step: whatever
    happens, the path holds the old file or the whole new one. The same records always give the same bytes.
    Errors: UserError where the name is not one of JSON Lines or the folder cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing at the file, instead of being replaced by it
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"{path}: records are written as JSON Lines; use a name that ends in .jsonl or .jsonl.gz")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as stream:
            _write_lines(stream, records, compressed=target.name.endswith(".gz"))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        wrong = f"cannot be written ({error.strerror or error})"
        raise UserError(f"{path}: {wrong}; make the folder writable; an old file is kept as it was") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_lines(stream: IO[bytes], records: Iterable[Record], *, compressed: bool) -> None:
    # No name and no time in the gzip header, or equal records would give different bytes.
    packed = gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) if compressed else None
    text = io.TextIOWrapper(packed or stream, encoding="utf-8", newline="\n")
    for record in records:
        text.write(json.dumps(record.to_row(), ensure_ascii=False) + "\n")
    text.flush()
    text.detach()
    if packed is not None:
        packed.close()


def _sync_folder(folder: Path) -> None:
    """Force the new name itself to disk, where the system lets a folder be opened (Windows does not)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
