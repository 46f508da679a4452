"""`align data check` and `align data convert`: summarize a data file, find overlap, convert to the native format."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from align.core.errors import UserError, counted
from align.data.formats import KINDS, find_format
from align.data.readers import (
    LISTED_PROBLEMS,
    Scan,
    require_records,
    require_used_columns,
    scan_records,
    scan_rows,
    write_records,
)
from align.data.records import AttributeJudgment, Demonstration, Prompt, Ranking, Record, RuleJudgment
from align.data.sources import iter_rows

ROWS_TO_GUESS_FROM = 100
KINDS_MOST_SPECIFIC_FIRST = ("ranking", "rule judgment", "attribute judgment", "demonstration", "prompt")
LISTED_CATEGORIES = 10
EXAMPLES = 2
EXAMPLE_LENGTH = 90  # maximum characters shown of a text


def check_data(path: str, kind: str | None = None) -> str:
    """Summarize a source as records of one type: one fact per line, bad rows last.

    Args:
        path: a file, a folder or the name of a hub data set.
        kind: a name in `KINDS` (also with - or _). If None, the kind is guessed from the first rows.
    """
    name = find_kind(path, kind)
    scanned = scan_rows(iter_rows(path), KINDS[name])
    require_records(scanned, path, KINDS[name])
    require_used_columns(path, scanned)
    records: Sequence[Record] = scanned.records
    entries = [
        ("source", path),
        ("kind", name),
        ("layout", ", ".join(f"{name} ({counted(count, 'row')})" for name, count in scanned.formats.most_common())),
        ("records", f"{len(records)} from {counted(scanned.rows, 'row')}"),
        ("multi-turn", _format_share(sum(map(_is_multi_turn, records)), len(records))),
        *_kind_facts(records),
        *_prompt_facts(records),
        *_response_facts(records),
        ("categories", _list_most_common(record.category for record in records)),
        ("repeated prompts", _format_share(_count_repeated(records), len(records))),
    ]
    if scanned.unused:
        entries.append(("unused columns", _list_unused(scanned)))
    if scanned.single:
        entries.append(("skipped", f"{counted(scanned.single, 'prompt')} with a single rated response"))
    for number, record in enumerate(records[:EXAMPLES], start=1):
        shown = _example_lines(record)
        entries += zip([f"example {number}", *[""] * (len(shown) - 1)], shown, strict=True)
    lines = [f"{name + ':' if name else '':<23}{value}" for name, value in entries]
    return "\n".join(lines + _problem_lines(scanned))


def convert_data(source: str, output: str | os.PathLike[str], kind: str | None = None, skip_bad_rows: bool = False) -> str:
    """Write a source as native JSON Lines (docs/data.md). Return a summary with the number of records and unused columns.

    The name of the output must end in .jsonl or .jsonl.gz. For `kind`, see `check_data`.
    """
    if os.path.exists(output):
        raise UserError(f"{output} already exists; choose another output or remove it")
    name = find_kind(source, kind)
    scanned = scan_records(source, KINDS[name], skip_bad_rows=skip_bad_rows, token_ids=True)
    write_records(output, scanned.records)
    unused = f"\nunused columns: {_list_unused(scanned)}" if scanned.unused else ""
    return f"{output}: {counted(len(scanned.records), 'record')} of type {name}{unused}"


def _list_unused(scanned: Scan[Record]) -> str:
    """List the columns that no field uses, with the number of rows if some good rows lack the column."""
    good = scanned.rows - len(scanned.problems)
    return ", ".join(name if n == good else f"{name} ({counted(n, 'row')})" for name, n in scanned.unused.items())


def find_kind(source: str, kind: str | None) -> str:
    """Return the name in `KINDS` of a given kind (also with - or _), or guess it if None."""
    name = kind.lower().replace("_", " ").replace("-", " ") if kind else guess_kind(source)
    if name not in KINDS:
        raise UserError(f"unknown record type '{kind}'; use one of {', '.join(KINDS)}")
    return name


MOST_LINES = 8


def _example_lines(record: Record) -> list[str]:
    """Format a parsed record, one line per turn and response. `*` marks the turns to train on."""
    lines = [f"{turn['role']}: {turn['content']}" for turn in record.prompt]
    match record:
        case Prompt(ids=tuple(ids)):
            lines = [f"token ids: {' '.join(map(str, ids))}"]
        case Demonstration():
            for turn in record.continuation:
                lines.append(f"{'* ' if turn['role'] == 'assistant' else ''}{turn['role']}: {turn['content']}")
        case Ranking():
            order = sorted(zip(record.ranks, record.responses, strict=True), key=lambda pair: pair[0])
            lines += [f"rank {rank}: {response}" for rank, response in order]
        case RuleJudgment():
            lines += [f"response: {record.response}", f"rule {record.rule}: {record.verdict}"]
        case AttributeJudgment():
            numbers = ", ".join(f"{name} {number:g}" for name, number in record.attributes.items())
            lines += [f"response: {record.response}", f"attributes: {numbers}"]
    shown = [" ".join(line.split()) for line in lines[:MOST_LINES]]
    omitted = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [line if len(line) <= EXAMPLE_LENGTH else f"{line[:EXAMPLE_LENGTH]}..." for line in shown] + omitted


def guess_kind(source: str) -> str:
    """Return the kind of the first recognized row, the most specific one if several match."""
    columns: dict[str, None] = {}
    unreadable: list[str] = []
    rows = list(islice(iter_rows(source), ROWS_TO_GUESS_FROM))
    for where, row in rows:
        if isinstance(row, UserError):
            unreadable.append(f"{where}: {row}")
        if not isinstance(row, Mapping):
            continue
        columns |= dict.fromkeys(row)
        for name in KINDS_MOST_SPECIFIC_FIRST:
            if find_format(row, KINDS[name]) is not None:
                return name
    if unreadable and not columns:
        raise UserError(unreadable[0])
    if not rows:
        raise UserError(f"{source}: no rows; write one record per line")
    wrong = f"no known layout has the columns {', '.join(columns) or '(none)'}; set the record type to see what is missing"
    raise UserError(f"{source}: {wrong}, or rename columns: FILE[FIELD=COLUMN, ...]")


def _problem_lines(scanned: Scan[Record]) -> list[str]:
    if not scanned.problems:
        return [f"{'bad rows:':<23}none"]
    listed = [f"  {problem}" for problem in scanned.problems[:LISTED_PROBLEMS]]
    omitted = len(scanned.problems) - len(listed)
    rest = [f"  and {omitted} more"] if omitted else []
    return [f"{'bad rows:':<23}{_format_share(len(scanned.problems), scanned.rows)}", *listed, *rest]


def _is_multi_turn(record: Record) -> bool:
    """Return whether an earlier answer is part of the prompt, or there are several answers to train on."""
    answers = [turn for turn in record.prompt if turn["role"] == "assistant"]
    return bool(answers) or (isinstance(record, Demonstration) and len(record.continuation) > 1)


def _prompt_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    texts = [record for record in records if record.prompt]
    ids = [record.ids for record in records if isinstance(record, Prompt) and record.ids is not None]
    counts = [sum(len(turn["content"].split()) for turn in record.prompt) for record in texts]
    words = [("words in the prompt", _describe_lengths(counts))] if texts else []
    return words + ([("tokens in the prompt", _describe_lengths(map(len, ids)))] if ids else [])


def _kind_facts(records: Sequence[Any]) -> list[tuple[str, str]]:
    match records[0]:
        case Ranking():
            sizes = Counter(len(record.responses) for record in records)
            histogram = ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items()))
            pairs = sum(math.comb(len(record.responses), 2) for record in records)
            ties = sum(math.comb(n, 2) for record in records for n in Counter(record.ranks).values())
            return [("responses per ranking", histogram), ("tied pairs", _format_share(ties, pairs))]
        case RuleJudgment():
            counted_by = {"verdicts": [record.verdict for record in records], "rules": [record.rule for record in records]}
            return [(name, _list_most_common(values)) for name, values in counted_by.items()]
        case AttributeJudgment():
            return [("attributes", _list_most_common(name for record in records for name in record.attributes))]
    return []


def _response_facts(records: Sequence[Any]) -> list[tuple[str, str]]:
    match records[0]:
        case Prompt():
            return []
        case Demonstration():
            turns = (turn for record in records for turn in record.continuation)
            texts = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        case Ranking():
            texts = [response for record in records for response in record.responses]
        case _:
            texts = [record.response for record in records]
    lengths = [len(text.split()) for text in texts]
    empty = [("empty responses", _format_share(lengths.count(0), len(lengths)))] if 0 in lengths else []
    return [("words in a response", _describe_lengths(lengths)), *empty]


def _count_repeated(records: Sequence[Record]) -> int:
    prompts = {tuple((turn["role"], turn["content"]) for turn in record.prompt) for record in records if record.prompt}
    ids = {record.ids for record in records if isinstance(record, Prompt) and record.ids is not None}
    return len(records) - len(prompts) - len(ids)


def _describe_lengths(values: Iterable[int]) -> str:
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]
    most = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return f"min {low}, median {middle}, mean {sum(ordered) / len(ordered):.1f}, 95th percentile {most}, max {high}"


def _list_most_common(names: Iterable[str | None]) -> str:
    counts = Counter(name for name in names if name is not None).most_common()
    if not counts:
        return "none"
    listed = ", ".join(f"{name} {count}" for name, count in counts[:LISTED_CATEGORIES])
    omitted = len(counts) - LISTED_CATEGORIES
    return f"{listed}, and {omitted} more" if omitted > 0 else listed


def _format_share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "0"


# ----------------------------------------------- rows of an evaluation that share words with training data (contamination)


WORDS = 13  # GPT-3, appendix C
FEWEST_WORDS = 8  # also GPT-3: minimum N, for short documents
FREQUENT = 10  # also GPT-3: ignores "N-grams that occur more than 10 times"
LISTED = 20
_WORD = re.compile(r"\w+")
Gram = tuple[str, ...]


class Match(NamedTuple):
    """An evaluation row, the first training row that shares words with it, and the words."""

    evaluation: str
    training: str
    words: str


class Overlap(NamedTuple):
    """Overlap of two sources.

    Attributes:
        rows: number of evaluation rows.
        too_short: number of these rows without a string of `FEWEST_WORDS` words, which are not compared.
        training_rows: number of training rows.
        matches: one match for each suspicious row, in the order of the evaluation.
        frequent: word sequences of the evaluation that were left out because many training rows have them.
    """

    rows: int
    too_short: int
    training_rows: int
    matches: list[Match]
    frequent: int


def find_overlap(training: str | os.PathLike[str], evaluation: str | os.PathLike[str]) -> Overlap:
    """Compare all text in all rows, in any layout. The training data are streamed and may be larger than memory.

    As GPT-3's check for contamination (Brown et al. 2020, arXiv 2005.14165, section 4 and appendix C): a row is suspicious
    if it shares 13 consecutive words with the training data, ignoring case and punctuation. Word sequences that occur in
    more than ten training rows are common phrases or templates, and are ignored.

    A string of fewer words must match completely.
    """
    rows_of_gram: dict[Gram, list[str]] = {}
    order: list[str] = []
    too_short = training_rows = 0
    for where, texts in _texts_of_rows(evaluation):
        long = (text for text in texts if len(text) >= FEWEST_WORDS)
        grams = {gram for text in long for gram in _windows(text, min(WORDS, len(text)))}
        too_short += not grams
        order.append(where)
        for gram in grams:
            rows_of_gram.setdefault(gram, []).append(where)
    # A shorter evaluation text can occur anywhere in a training text.
    lengths = sorted({len(gram) for gram in rows_of_gram})
    counts = Counter[Gram]()
    first: dict[Gram, str] = {}
    for where, texts in _texts_of_rows(training):
        training_rows += 1
        sequences = (gram for text in texts for length in lengths for gram in _windows(text, length))
        grams = {gram for gram in sequences if gram in rows_of_gram}
        counts.update(grams)
        for gram in grams:
            first.setdefault(gram, where)
    match_of: dict[str, Match] = {}
    for gram in sorted(gram for gram, count in counts.items() if count <= FREQUENT):
        for where in rows_of_gram[gram]:
            match_of.setdefault(where, Match(where, first[gram], " ".join(gram)))
    matches = [match_of[where] for where in order if where in match_of]
    frequent = sum(count > FREQUENT for count in counts.values())
    return Overlap(len(order), too_short, training_rows, matches, frequent)


def describe_overlap(training: str, evaluation: str) -> str:
    """Describe the result of `find_overlap`, one fact per line, with the suspicious rows at the end."""
    overlap = find_overlap(training, evaluation)
    judged = overlap.rows - overlap.too_short
    share = f" ({100 * len(overlap.matches) / judged:.1f} %)" if judged else ""
    rows = counted(overlap.rows, "row")
    lines = [
        f"training:      {training}, {counted(overlap.training_rows, 'row')}",
        f"evaluation:    {evaluation}, {rows}, of which {overlap.too_short} have no text of {FEWEST_WORDS} words or more",
        f"shared:        {len(overlap.matches)} of {judged} rows{share} share {WORDS} consecutive words or a short text",
    ]
    if overlap.frequent:
        lines.append(f"ignored:       {overlap.frequent} word sequences that occur in more than {FREQUENT} training rows")
    lines += [f'  {match.evaluation} with {match.training}: "{match.words}"' for match in overlap.matches[:LISTED]]
    omitted = len(overlap.matches) - LISTED
    return "\n".join(lines + ([f"  and {omitted} more"] if omitted > 0 else []))


def _texts_of_rows(source: str | os.PathLike[str]) -> Iterator[tuple[str, list[list[str]]]]:
    for row in iter_rows(os.fspath(source)):
        yield row.where, [_WORD.findall(text.lower().replace("_", " ")) for text in _texts(row.row)]


def _texts(value: object) -> Iterator[str]:
    """Yield every string in a row, in any layout. Word sequences never span two strings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _windows(text: list[str], length: int) -> Iterator[Gram]:
    for start in range(len(text) - length + 1):
        yield tuple(text[start : start + length])
