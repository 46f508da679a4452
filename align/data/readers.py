"""Readers of records and of raw texts from any source in any known layout, few-shot examples, and a writer of JSON Lines."""

import gzip
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

from align.core.errors import UserError, counted
from align.core.files import new_file
from align.data.conversation import Conversation
from align.data.fields import check_id, check_row, check_text, required_field
from align.data.formats import convert_row, kind_name
from align.data.ratings import RatedAnswer, rank_ratings
from align.data.records import Demonstration, Message, Prompt, Record
from align.data.sources import SourceRow, iter_rows

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
Item = TypeVar("Item")
LISTED_PROBLEMS = 5


@dataclass(slots=True)
class Scan(Generic[R]):
    """The contents of a source.

    Attributes:
        records: those of all good rows.
        formats: rows by layout.
        unused: rows in which a field was given and not read, by the field's name.
        problems: a line for each bad row.
        single: prompts with one rated response, which make no ranking.
    """

    records: list[R] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    problems: list[str] = field(default_factory=list)
    single: int = 0


def scan(source: str | os.PathLike[str], kind: type[R], *, stop_at_bad: bool = False, split: str = "train") -> Scan[R]:
    """Read a source to its end, or with `stop_at_bad` to its first bad row, which is then a UserError."""
    return scan_rows(iter_rows(os.fspath(source), split), kind, stop_at_bad=stop_at_bad)


def scan_rows(rows: Iterable[SourceRow], kind: type[R], *, stop_at_bad: bool = False) -> Scan[R]:
    """`scan` for rows, some of which may be records already. Ratings of single answers become rankings at the end."""
    scanned: Scan[R] = Scan()
    rated: list[RatedAnswer] = []
    for row in rows:
        scanned.rows += 1
        if isinstance(row.row, kind):
            scanned.records.append(row.row)
            continue
        try:
            if row.error is not None:
                raise UserError(row.error)
            layout, records = convert_row(row.row, kind, scanned.unused)
        except UserError as error:
            problem = f"{row.where}: {error}"
            if stop_at_bad:
                raise UserError(problem) from error
            scanned.problems.append(problem)
        else:
            scanned.formats[layout.name] += 1
            rated.extend(record for record in records if isinstance(record, RatedAnswer))
            scanned.records.extend(record for record in records if isinstance(record, kind))
    rankings, scanned.single = rank_ratings(rated)
    scanned.records.extend(ranking for ranking in rankings if isinstance(ranking, kind))
    return scanned


def read_records(
    source: str | os.PathLike[str],
    kind: type[R],
    *,
    skip_bad_rows: bool = False,
    split: str = "train",
    token_ids: bool = False,
) -> list[R]:
    """All records of one kind in a source.

    Args:
        source: a file (.jsonl, .json, .csv, each also as .gz, or .parquet), a folder of such files or saved by `datasets`,
            or the name of a hub data set. An existing path takes precedence.
        kind: Demonstration, Ranking, RuleJudgment or Prompt; the layout is recognized row by row (`align.data.formats`).
        skip_bad_rows: log the number of bad rows and the first five, and return the others.
        split: for folders and hub names.
        token_ids: accept prompts as token ids (`Prompt.ids`), which have no text.

    Raises:
        UserError: in one line, for a bad row ("FILE:LINE: field 'ranks': problem; remedy", or
            "FILE: row N: ..." in files without lines), an unreadable source, or one without a usable record.
    """
    return scan_records(source, kind, skip_bad_rows=skip_bad_rows, split=split, token_ids=token_ids).records


def scan_records(
    source: str | os.PathLike[str], kind: type[R], *, skip_bad_rows: bool, split: str = "train", token_ids: bool = False
) -> Scan[R]:
    """Return the records of a source with counts and problems of its rows; arguments and errors as for `read_records`."""
    scanned = scan(source, kind, stop_at_bad=not skip_bad_rows, split=split)
    require_records(scanned, source, kind)
    report_single(scanned, str(source))
    if not token_ids and any(isinstance(record, Prompt) and not record.prompt for record in scanned.records):
        raise UserError(f"{source}: holds prompts as token ids (input_ids), and text is needed here; give the field prompt")
    if scanned.problems:
        _warn_of_bad_rows(f"{source}: skipped", scanned.problems, scanned.rows)
    return scanned


def report_single(scanned: Scan[R], name: str) -> None:
    """Log how many prompts with one rated response were left out, on the first process only."""
    if scanned.single and os.environ.get("RANK", "0") == "0":
        logger.warning("%s: left out %s with a single rated response", name, counted(scanned.single, "prompt"))


def require_records(scanned: Scan[R], source: str | os.PathLike[str], kind: type[R]) -> None:
    """Refuse a source without a single usable record."""
    if scanned.records:
        return
    if not scanned.rows:
        raise UserError(f"{source}: has no rows; write one record per line")
    if scanned.problems:
        bad = f"{len(scanned.problems)} of {scanned.rows} rows are bad"
        raise UserError(f"{source}: no usable {kind_name(kind)}; {bad}, the first: {scanned.problems[0]}")
    if scanned.single:
        wrong = f"each of its {scanned.single} prompts has a single rated response"
        raise UserError(f"{source}: no usable ranking; {wrong}; a comparison needs two or more responses to the same prompt")
    raise UserError(f"{source}: no usable {kind_name(kind)}; {counted(scanned.rows, 'readable row')}, but none of this kind")


def parse_rows(
    sources: Sequence[str],
    parse: Callable[[Mapping[str, Any], str], Iterable[Item]],
    nothing: str,
    *,
    skip_bad_rows: bool = False,
    split: str = "train",
) -> list[Item]:
    """Parse each row of files, folders or hub names; with `skip_bad_rows`, bad rows are logged and left out.

    Args:
        parse: from a row's fields and its number, from 1, to the items in it; raises a `UserError` for a bad row.
        nothing: the message for sources without an item, such as "holds no usable question".

    Raises:
        UserError: "FILE:LINE: ..." for a bad row, and for sources without an item.
    """
    items: list[Item] = []
    problems: list[str] = []
    number = 0
    for number, row in enumerate((row for source in sources for row in iter_rows(source, split)), start=1):
        try:
            if row.error is not None:
                raise UserError(row.error)
            items += parse(check_row(row.row), str(number))
        except UserError as error:
            problems.append(f"{row.where}: {error}")
            if not skip_bad_rows:
                raise UserError(problems[-1]) from error
    if not items:
        first = f"; the first bad row: {problems[0]}" if problems else ""
        raise UserError(f"{', '.join(sources)}: {nothing}{first}")
    if problems:
        _warn_of_bad_rows("skipped", problems, number)
    return items


def _warn_of_bad_rows(skipped: str, problems: Sequence[str], rows: int) -> None:
    logger.warning("%s %s of %d:", skipped, counted(len(problems), "bad row"), rows)
    for problem in problems[:LISTED_PROBLEMS]:
        logger.warning("%s", problem)


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write records as JSON Lines (UTF-8, compressed if the name ends in .gz), to a temporary file that is then renamed.

    Equal records give equal bytes.

    Args:
        path: a name that ends in .jsonl or .jsonl.gz; its folder is made if it is missing.
        records: may be a generator, which is read while writing.

    Raises:
        UserError: if the name ends in anything else or the folder cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link is kept, and the file it points to is replaced
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"{path}: records are written as JSON Lines; use a name that ends in .jsonl or .jsonl.gz")
    try:
        with new_file(target) as file:
            _write_lines(file, records, compressed=target.name.endswith(".gz"))
    except OSError as error:
        wrong = f"cannot be written ({error.strerror or error})"
        raise UserError(f"{path}: {wrong}; make the folder writable; an old file is kept as it was") from error


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


class Text(NamedTuple):
    """A document: a row with a `text`, such as a page or a book, which has no prompt and no answer."""

    text: str
    id: str | None = None


def read_texts(source: str | Sequence[str | Mapping[str, Any]], skip_bad_rows: bool = False) -> Iterator[Text]:
    """The documents of a file, folder or hub name, or of rows or texts in memory.

    Raises:
        UserError: for a source without any document, and for a bad row unless bad rows are skipped.
    """
    found = bad = 0
    for where, row in _rows(source):
        try:
            row = check_row(row)
            written = check_text(required_field(row, "text", "write the document there"), "text")
            text = Text(written, check_id(row.get("id")))
        except UserError as error:
            if not skip_bad_rows:
                raise UserError(f"{where}: {error}") from error
            bad += 1
            continue
        found += 1
        yield text
    name = source if isinstance(source, str) else "texts in memory"
    if bad:
        logger.warning("%s: skipped %s", name, counted(bad, "bad row"))
    if not found:
        raise UserError(f"{name}: no text in it; each row needs a field 'text'")


def _rows(source: str | Sequence[str | Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, str):
        for number, row in enumerate(source, start=1):
            yield f"texts in memory: item {number}", {"text": row} if isinstance(row, str) else row
        return
    for item in iter_rows(source):
        yield item.where, item.row if item.error is None else {}


@dataclass(frozen=True)
class FewShotPrompt:
    """Few-shot examples and an instruction before a prompt, for models that were not fine-tuned.

    InstructGPT compares with such a baseline, "GPT-3 (prompted)" (Ouyang et al. 2022, figure 1).

    Attributes:
        instruction: starts the first user turn, because some templates have no system role; may be empty.
        examples: questions with their answers, as earlier turns.
    """

    instruction: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def before(self, conversation: Conversation) -> Conversation:
        """Return the conversation after the examples and the instruction, which follow a system turn.

        An example with the same question is left out.
        """
        asked = conversation[-1]["content"].strip()
        start = 1 if conversation[0]["role"] == "system" else 0
        turns: list[Message] = [dict(turn) for turn in conversation[:start]]  # type: ignore[misc]
        for question, answer in self.examples:
            if question.strip() != asked:
                turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns += [dict(turn) for turn in conversation[start:]]  # type: ignore[misc]
        if self.instruction:
            turns[start]["content"] = f"{self.instruction}\n\n{turns[start]['content']}"
        return tuple(turns)


def read_few_shot_prompt(count: int, source: str, instruction: str) -> FewShotPrompt:
    """Return a prompt of the first demonstrations of a source that have one user turn and one answer.

    Args:
        count: how many; 0: the source is not read.
        source: a file, a folder or the name of a hub data set.
        instruction: may be empty.

    Raises:
        UserError: if the source cannot be read, or has fewer such demonstrations.
    """
    if not count:
        return FewShotPrompt(instruction)
    records = read_records(source, Demonstration)
    short = [record for record in records if len(record.prompt) == len(record.continuation) == 1]
    if len(short) < count:
        raise UserError(f"{source}: num_few_shot is {count}, but only {len(short)} of its demonstrations have a single turn")
    examples = tuple((record.prompt[0]["content"], record.continuation[0]["content"]) for record in short[:count])
    return FewShotPrompt(instruction, examples)
