"""Readers of records and raw text from any source and layout, few-shot prompts, and a JSON Lines writer."""

import gzip
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from align.core.errors import UserError, counted, nearest_name_hint
from align.core.files import new_file
from align.data.conversation import Conversation
from align.data.fields import WatchedRow, check_id, check_row, check_text, required_field
from align.data.formats import FIELDS, convert_row, kind_name
from align.data.layouts import RatedAnswer, rank_ratings
from align.data.records import Message, Prompt, Record
from align.data.sources import SourceRow, field_columns, iter_rows

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
Item = TypeVar("Item")
LISTED_PROBLEMS = 5


@dataclass(slots=True)
class Scan(Generic[R]):
    """Contents of a source.

    Attributes:
        records: records of all good rows.
        formats: number of rows by layout.
        unused: number of rows in which a field was given but not used, by field name.
        problems: a line for each bad row.
        single: prompts with one rated response, which cannot form a ranking.
    """

    records: list[R] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    problems: list[str] = field(default_factory=list)
    single: int = 0


def scan_rows(rows: Iterable[SourceRow], kind: type[R], *, stop_at_bad: bool = False, number_rows: bool = False) -> Scan[R]:
    """Convert rows to records. With `stop_at_bad`, the first bad row raises a UserError.

    With `number_rows`, a record without an id gets the number of its row. Numbers start from 1 and count bad rows.
    """
    scanned: Scan[R] = Scan()
    rated: list[RatedAnswer] = []
    for where, row in rows:
        scanned.rows += 1
        if isinstance(row, kind):
            scanned.records.append(_numbered(row, scanned.rows) if number_rows else row)
            continue
        try:
            layout, records = convert_row(row, kind, scanned.unused)
        except UserError as error:
            scanned.problems.append(f"{where}: {error}")
            if stop_at_bad:
                raise UserError(scanned.problems[0]) from error
        else:
            scanned.formats[layout.name] += 1
            rated.extend(record for record in records if isinstance(record, RatedAnswer))
            of_kind = [record for record in records if isinstance(record, kind)]
            scanned.records += [_numbered(record, scanned.rows) for record in of_kind] if number_rows else of_kind
    rankings, scanned.single = rank_ratings(rated)
    scanned.records.extend(ranking for ranking in rankings if isinstance(ranking, kind))
    return scanned


def _numbered(record: R, number: int) -> R:
    return record if record.id is not None else replace(record, id=str(number))  # type: ignore[type-var]  # a dataclass


def read_records(
    source: str | os.PathLike[str],
    kind: type[R],
    *,
    skip_bad_rows: bool = False,
    split: str = "train",
    token_ids: bool = False,
) -> list[R]:
    """Read all records of one type from a source.

    Args:
        source: a file (.jsonl, .json, .csv, each also as .gz, or .parquet), a folder of such files or saved by `datasets`,
            or the name of a hub data set. An existing path takes precedence.
        kind: Demonstration, Ranking, RuleJudgment or Prompt; the layout is recognized row by row (`align.data.formats`).
        skip_bad_rows: log the number of bad rows and the first five, and return the others.
        split: split of a folder or hub data set.
        token_ids: accept prompts as token ids (`Prompt.ids`), which have no text.

    Raises:
        UserError: one line, if a row is invalid ("FILE:LINE: field 'ranks': problem; remedy", or
            "FILE: row N: ..." in files without lines), an unreadable source, or one without a usable record.
    """
    return scan_records(source, kind, skip_bad_rows=skip_bad_rows, split=split, token_ids=token_ids).records


def scan_records(
    source: str | os.PathLike[str],
    kind: type[R],
    *,
    skip_bad_rows: bool,
    split: str = "train",
    token_ids: bool = False,
    number_rows: bool = False,
) -> Scan[R]:
    """Read the records of a source with counts and problems.

    For arguments and errors, see `read_records` and `scan_rows`.
    """
    rows = iter_rows(os.fspath(source), split)
    scanned = scan_rows(rows, kind, stop_at_bad=not skip_bad_rows, number_rows=number_rows)
    require_records(scanned, source, kind)
    require_used_columns(str(source), scanned)
    report_single(scanned, str(source))
    if not token_ids and any(isinstance(record, Prompt) and not record.prompt for record in scanned.records):
        raise UserError(
            f"{source}: contains prompts as token ids (input_ids), but text is needed here; add the field prompt"
        )
    if scanned.problems:
        warn_of_bad_rows(f"{source}: skipped", scanned.problems, scanned.rows)
    return scanned


def report_single(scanned: Scan[R], name: str) -> None:
    """Log the number of skipped prompts with a single rated response, on the first process only."""
    if scanned.single and os.environ.get("RANK", "0") == "0":
        logger.warning("%s: skipped %s with a single rated response", name, counted(scanned.single, "prompt"))


def require_records(scanned: Scan[R], source: str | os.PathLike[str], kind: type[R]) -> None:
    """Raise a UserError if a source has no usable records."""
    if scanned.records:
        return
    if not scanned.rows:
        raise UserError(f"{source}: no rows; write one record per line")
    if scanned.problems:
        bad = f"{len(scanned.problems)} of {scanned.rows} rows are invalid"
        raise UserError(f"{source}: no usable {kind_name(kind)}; {bad}, the first: {scanned.problems[0]}")
    if scanned.single:
        wrong = f"all {scanned.single} prompts have a single rated response"
        raise UserError(f"{source}: no usable ranking; {wrong}; rate two or more responses per prompt")
    raise UserError(f"{source}: no usable {kind_name(kind)}; {counted(scanned.rows, 'readable row')}, but none of this type")


def require_used_columns(source: str, scanned: Scan[Any]) -> None:
    """Raise a UserError if a source maps a column to a field that no row uses."""
    is_prompt = any(isinstance(record, Prompt) for record in scanned.records[:1])  # answers in the row are ignored
    good = scanned.rows - len(scanned.problems)
    unused = {field for field, rows in scanned.unused.items() if rows == good and not (is_prompt and field in FIELDS)}
    _refuse_unused(source, field_columns(source) & unused)


def _refuse_unused(source: str, fields: set[str]) -> None:
    if fields:
        name = min(fields)
        hint = nearest_name_hint(name, FIELDS | {"id", "category", "labeler", "system", "history", "margin"} - {name})
        raise UserError(f"{source}: no row uses the field '{name}' mapped in brackets{hint or '; remove it'}")


def parse_rows(
    sources: Sequence[str],
    parse: Callable[[Mapping[str, Any], str], Iterable[Item]],
    nothing: str,
    *,
    skip_bad_rows: bool = False,
    split: str = "train",
) -> list[Item]:
    """Parse each row of files, folders or Hub data sets. With `skip_bad_rows`, log and skip bad rows.

    Args:
        parse: from a row's fields and its number, from 1, to the items in it; raises a `UserError` for a bad row.
        nothing: error message for sources without items, such as "holds no usable question".
    """
    rows = (row for source in sources for row in iter_rows(source, split))
    columns = set().union(*map(field_columns, sources))
    return list(_parse(rows, ", ".join(sources), parse, nothing, skip_bad_rows, columns))


def _parse(
    rows: Iterable[SourceRow],
    name: str,
    parse: Callable[[Mapping[str, Any], str], Iterable[Item]],
    nothing: str,
    skip_bad_rows: bool,
    columns: Collection[str] = (),
) -> Iterator[Item]:
    """Yield the parsed rows. `columns` are mapped fields, which must be used."""
    problems: list[str] = []
    unused = set(columns)
    number, is_empty = 0, True
    for number, (where, row) in enumerate(rows, start=1):
        try:
            watched = WatchedRow(check_row(row))
            items = list(parse(watched, str(number)))
        except UserError as error:
            problems.append(f"{where}: {error}")
            if not skip_bad_rows:
                raise UserError(problems[0]) from error
        else:
            unused -= watched.read
            is_empty = is_empty and not items
            yield from items
    if is_empty:
        raise UserError(f"{name}: {nothing}{f'; the first bad row: {problems[0]}' if problems else ''}")
    _refuse_unused(name, unused)
    if problems:
        warn_of_bad_rows(f"{name}: skipped", problems, number)


def warn_of_bad_rows(skipped: str, problems: Sequence[str], rows: int) -> None:
    """Log the number of bad rows and the first five. `skipped` starts the message."""
    logger.warning("%s %s of %d:", skipped, counted(len(problems), "bad row"), rows)
    for problem in problems[:LISTED_PROBLEMS]:
        logger.warning("%s", problem)


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Atomically write records as JSON Lines (UTF-8, compressed if the name ends in .gz).

    Equal records give equal bytes.

    Args:
        path: a name that ends in .jsonl or .jsonl.gz. Its folder is created if missing.
    """
    target = Path(os.path.realpath(path))  # follow symlinks
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"{path}: records are written as JSON Lines; use the extension .jsonl or .jsonl.gz")
    lines = ((json.dumps(record.to_row(), ensure_ascii=False) + "\n").encode() for record in records)
    try:
        with new_file(target) as file:
            if target.name.endswith(".gz"):  # omit name and time for reproducible bytes
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                    packed.writelines(lines)
            else:
                file.writelines(lines)
    except OSError as error:
        wrong = f"cannot be written ({error.strerror or error})"
        raise UserError(f"{path}: {wrong}; an existing file is unchanged") from error


class Text(NamedTuple):
    """A document for language modeling: a row with a `text`, without prompt and answer."""

    text: str
    id: str | None = None


def read_texts(source: str | Sequence[str | Mapping[str, Any]], skip_bad_rows: bool = False) -> Iterator[Text]:
    """Read documents from a file, folder, Hub data set, rows or strings. Errors as in `parse_rows`."""
    if isinstance(source, str):
        name, rows = source, iter_rows(source)
    else:
        name = "texts in memory"
        items = enumerate(({"text": row} if isinstance(row, str) else row for row in source), start=1)
        rows = (SourceRow(f"{name}: item {number}", row) for number, row in items)
    columns = field_columns(source) if isinstance(source, str) else ()
    return _parse(rows, name, _text_of_row, "no text; each row needs a field 'text'", skip_bad_rows, columns)


def _text_of_row(row: Mapping[str, Any], number: str) -> Iterator[Text]:
    text = check_text(required_field(row, "text", "add the document"), "text")
    yield Text(text, check_id(row.get("id")))


@dataclass(frozen=True)
class FewShotPrompt:
    """Few-shot examples and an instruction, for models without fine-tuning.

    InstructGPT compares with such a baseline, "GPT-3 (prompted)" (Ouyang et al. 2022, figure 1).

    Attributes:
        instruction: beginning of the first user turn, because some templates have no system role. May be empty.
        examples: questions with their answers, as earlier turns.
    """

    instruction: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def before(self, conversation: Conversation) -> Conversation:
        """Prepend the instruction and examples (of other questions) to a conversation, after its system turn."""
        asked = conversation[-1]["content"].strip()
        start = 1 if conversation[0]["role"] == "system" else 0
        turns: list[Message] = [*conversation[:start]]
        for question, answer in self.examples:
            if question.strip() != asked:
                turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns += conversation[start:]
        if self.instruction:
            turns[start] = {"role": turns[start]["role"], "content": f"{self.instruction}\n\n{turns[start]['content']}"}
        return tuple(turns)
