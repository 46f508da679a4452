"""The description of a data file that `align data check FILE` prints, and which rows of an evaluation training data hold."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from align.core.errors import UserError
from align.data.formats import KINDS, find_format
from align.data.readers import LISTED_PROBLEMS, Scan, require_records, scan
from align.data.records import AttributeJudgment, Demonstration, Prompt, Ranking, Record, RuleJudgment
from align.data.sources import iter_rows

ROWS_TO_GUESS_FROM = 100
KINDS_MOST_SPECIFIC_FIRST = ("ranking", "rule judgment", "attribute judgment", "demonstration", "prompt")
LISTED_CATEGORIES = 10


def check_data(path: str, kind: str | None = None) -> str:
    """Describe a source as records of the named kind, or of the kind that its first rows look like.

    Args:
        path: a file, a folder or the name of a hub data set.
        kind: a name in `KINDS` (also with - or _).

    Returns:
        The description, one fact per line; bad rows are listed at its end.

    Raises:
        UserError: for an unknown kind, an unreadable file, or one without a usable record.
    """
    name = kind.lower().replace("_", " ").replace("-", " ") if kind else guess_kind(path)
    if name not in KINDS:
        raise UserError(f"unknown kind of record '{kind}'; use one of {', '.join(KINDS)}")
    scanned = scan(path, KINDS[name])
    require_records(scanned, path, KINDS[name])
    records: Sequence[Record] = scanned.records
    facts = [
        ("source", path),
        ("kind", name),
        ("layout", ", ".join(f"{name} ({_format_rows(count)})" for name, count in scanned.formats.most_common())),
        ("records", f"{len(records)} from {_format_rows(scanned.rows)}"),
        ("multi-turn", _format_share(sum(map(_is_multi_turn, records)), len(records))),
        *_kind_facts(records),
        *_prompt_facts(records),
        *_response_facts(records),
        ("categories", _list_most_common(record.category for record in records)),
        ("repeated prompts", _format_share(_count_repeated(records), len(records))),
    ]
    if scanned.unused:
        good = scanned.rows - len(scanned.problems)
        unused = (name if n == good else f"{name} ({_format_rows(n)})" for name, n in scanned.unused.items())
        facts.append(("columns not used", ", ".join(unused)))
    lines = [f"{name + ':':<23}{value}" for name, value in facts]
    return "\n".join(lines + _problem_lines(scanned))


def guess_kind(source: str) -> str:
    """The name of the kind of the first recognized row; the most specific one if several match."""
    for number, row in enumerate(iter_rows(source)):
        if number == ROWS_TO_GUESS_FROM:
            break
        for name in KINDS_MOST_SPECIFIC_FIRST if isinstance(row.row, Mapping) else ():
            if find_format(row.row, KINDS[name]) is not None:
                return name
    raise UserError(f"{source}: no row has the fields of a known layout; name the kind to see what is missing")


def _problem_lines(scanned: Scan[Record]) -> list[str]:
    if not scanned.problems:
        return [f"{'bad rows:':<23}none"]
    listed = [f"  {problem}" for problem in scanned.problems[:LISTED_PROBLEMS]]
    more = len(scanned.problems) - len(listed)
    rest = [f"  and {more} more"] if more else []
    return [f"{'bad rows:':<23}{_format_share(len(scanned.problems), scanned.rows)}", *listed, *rest]


def _is_multi_turn(record: Record) -> bool:
    """Whether an earlier answer is part of the prompt, or there are several answers to learn from."""
    answers = [turn for turn in record.prompt if turn["role"] == "assistant"]
    return bool(answers) or (isinstance(record, Demonstration) and len(record.continuation) > 1)


def _prompt_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    texts = [record for record in records if record.prompt]
    ids = [record.ids for record in records if isinstance(record, Prompt) and record.ids is not None]
    counts = [sum(len(turn["content"].split()) for turn in record.prompt) for record in texts]
    words = [("words in the prompt", _describe_lengths(counts))] if texts else []
    return words + ([("tokens in the prompt", _describe_lengths(map(len, ids)))] if ids else [])


def _kind_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    rankings = [record for record in records if isinstance(record, Ranking)]
    judgments = [record for record in records if isinstance(record, RuleJudgment)]
    if rankings:
        sizes = Counter(len(record.responses) for record in rankings)
        histogram = ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items()))
        pairs = sum(math.comb(len(record.responses), 2) for record in rankings)
        ties = sum(math.comb(n, 2) for record in rankings for n in Counter(record.ranks).values())
        return [("responses per ranking", histogram), ("tied pairs", _format_share(ties, pairs))]
    if judgments:
        return [
            ("verdicts", _list_most_common(record.verdict for record in judgments)),
            ("rules", _list_most_common(record.rule for record in judgments)),
        ]
    attributes = [record for record in records if isinstance(record, AttributeJudgment)]
    if attributes:
        return [("attributes", _list_most_common(name for record in attributes for name in record.attributes))]
    return []


def _response_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    lengths: list[int] = []
    for record in records:
        if isinstance(record, Demonstration):
            lengths += [len(turn["content"].split()) for turn in record.continuation if turn["role"] == "assistant"]
        elif isinstance(record, Ranking):
            lengths += [len(response.split()) for response in record.responses]
        elif isinstance(record, RuleJudgment | AttributeJudgment):
            lengths.append(len(record.response.split()))
    empty = [("empty responses", _format_share(lengths.count(0), len(lengths)))] if 0 in lengths else []
    return [("words in a response", _describe_lengths(lengths)), *empty] if lengths else []


def _count_repeated(records: Sequence[Record]) -> int:
    prompts = {tuple((turn["role"], turn["content"]) for turn in record.prompt) for record in records if record.prompt}
    ids = {record.ids for record in records if isinstance(record, Prompt) and record.ids is not None}
    return len(records) - len(prompts) - len(ids)


def _describe_lengths(values: Iterable[int]) -> str:
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]
    most = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return f"least {low}, median {middle}, mean {sum(ordered) / len(ordered):.1f}, 95 % up to {most}, most {high}"


def _list_most_common(names: Iterable[str | None]) -> str:
    counts = Counter(name for name in names if name is not None).most_common()
    if not counts:
        return "none"
    listed = ", ".join(f"{name} {count}" for name, count in counts[:LISTED_CATEGORIES])
    more = len(counts) - LISTED_CATEGORIES
    return f"{listed}, and {more} more" if more > 0 else listed


def _format_rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _format_share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "0"


WORDS = 13  # GPT-3, appendix C
FEWEST_WORDS = 8  # the same: the smallest N for data sets of short texts; here for a text that is shorter than 13 words
FREQUENT = 10  # the same: "N-grams that occur more than 10 times" are left out
LISTED = 20
_WORD = re.compile(r"\w+")
Gram = tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """An evaluation row, the first training row that shares words with it, and the words."""

    evaluation: str
    training: str
    words: str


@dataclass
class Overlap:
    """What two sources share.

    Attributes:
        rows: of the evaluation.
        too_short: of those, how many have no text of `FEWEST_WORDS` words and are not compared.
        training_rows: rows of the training data.
        matches: one for each suspicious row, in the order of the evaluation.
        frequent: word sequences of the evaluation that were left out because many training rows have them.
    """

    rows: int = 0
    too_short: int = 0
    training_rows: int = 0
    matches: list[Match] = field(default_factory=list)
    frequent: int = 0


def find_overlap(training: str | os.PathLike[str], evaluation: str | os.PathLike[str]) -> Overlap:
    """Compare every text of every row, in any layout; the training data are streamed and may be larger than memory.

    As GPT-3's check for contamination (Brown et al. 2020, arXiv 2005.14165, section 4 and appendix C): a row is suspicious
    if it shares 13 consecutive words with the training data, ignoring case and punctuation. Word sequences that occur in
    more than ten training rows are common phrases or templates, and are ignored.

    A text of fewer words must match as a whole.
    """
    found = Overlap()
    rows_of_gram: dict[Gram, list[str]] = {}
    order: list[str] = []
    for where, texts in _texts_of_rows(evaluation):
        long = (text for text in texts if len(text) >= FEWEST_WORDS)
        grams = {gram for text in long for gram in _windows(text, min(WORDS, len(text)))}
        found.rows += 1
        found.too_short += not grams
        order.append(where)
        for gram in grams:
            rows_of_gram.setdefault(gram, []).append(where)
    # A text of the evaluation with fewer words can lie anywhere in a training text.
    lengths = sorted({len(gram) for gram in rows_of_gram})
    counts: dict[Gram, int] = {}
    first: dict[Gram, str] = {}
    for where, texts in _texts_of_rows(training):
        found.training_rows += 1
        for gram in {
            gram for text in texts for length in lengths for gram in _windows(text, length) if gram in rows_of_gram
        }:
            counts[gram] = counts.get(gram, 0) + 1
            first.setdefault(gram, where)
    found.frequent = sum(count > FREQUENT for count in counts.values())
    match_of: dict[str, Match] = {}
    for gram in sorted(gram for gram, count in counts.items() if count <= FREQUENT):
        for where in rows_of_gram[gram]:
            match_of.setdefault(where, Match(where, first[gram], " ".join(gram)))
    found.matches = [match_of[where] for where in order if where in match_of]
    return found


def describe_overlap(training: str, evaluation: str) -> str:
    """`find_overlap` in words, one fact a line, with the suspicious rows at the end."""
    found = find_overlap(training, evaluation)
    judged = found.rows - found.too_short
    share = f" ({100 * len(found.matches) / judged:.1f} %)" if judged else ""
    lines = [
        f"training:      {training}, {found.training_rows} rows",
        f"evaluation:    {evaluation}, {found.rows} rows, of which {found.too_short} have no text of {FEWEST_WORDS} words",
        f"shared:        {len(found.matches)} of {judged} rows{share} share {WORDS} words in a row, or a whole shorter text",
    ]
    if found.frequent:
        lines.append(f"left out:      {found.frequent} word sequences that more than {FREQUENT} training rows have")
    lines += [f'  {match.evaluation} with {match.training}: "{match.words}"' for match in found.matches[:LISTED]]
    more = len(found.matches) - LISTED
    return "\n".join(lines + ([f"  and {more} more"] if more > 0 else []))


def _texts_of_rows(source: str | os.PathLike[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Where each row is, and the words of each of its texts."""
    for row in iter_rows(os.fspath(source)):
        yield row.where, [_WORD.findall(text.lower().replace("_", " ")) for text in _texts(row.row)]


def _texts(value: object) -> Iterator[str]:
    """Every text in a row, whatever its layout: words of different texts never make one sequence."""
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
