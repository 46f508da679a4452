"""What is in a data file, in words: the text of `align data check FILE`."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from align.data.conversation import Conversation
from align.data.formats import KINDS, find_format, kind_name
from align.data.readers import LISTED_PROBLEMS, Scan, check_usable, scan
from align.data.records import Demonstration, Prompt, Ranking, Record, RuleJudgment
from align.data.sources import iter_rows
from align.errors import UserError

ROWS_TO_GUESS_FROM = 100
KINDS_RICHEST_FIRST: tuple[type[Record], ...] = (Ranking, RuleJudgment, Demonstration, Prompt)
LISTED_CATEGORIES = 10


def check_data(path: str, kind_name: str | None = None) -> str:
    """The description of a file as records of the named kind, or of the kind that its first rows look like.

    kind_name: demonstration, ranking, "rule judgment" (also with - or _) or prompt.
    Errors: UserError for another name, an unreadable file, or one without a usable record. Bad rows are listed in
    the text.
    """
    if kind_name is None:
        return describe(path, guess_kind(path))
    name = kind_name.lower().replace("_", " ").replace("-", " ")
    if name not in KINDS:
        raise UserError(f"unknown kind of record '{kind_name}'; use one of {', '.join(KINDS)}")
    return describe(path, KINDS[name])


def guess_kind(source: str | os.PathLike[str], split: str = "train") -> type[Record]:
    """The kind of the first recognised row, a ranking rather than a demonstration or prompt.

    Errors: UserError where no row near the start is recognised.
    """
    for number, row in enumerate(iter_rows(os.fspath(source), split)):
        if number == ROWS_TO_GUESS_FROM:
            break
        for kind in KINDS_RICHEST_FIRST if isinstance(row.row, Mapping) else ():
            if find_format(row.row, kind) is not None:
                return kind
    raise UserError(f"{source}: no row has the fields of a known layout; name the kind to see what is missing")


def describe(source: str | os.PathLike[str], kind: type[Record], split: str = "train") -> str:
    """Layouts, numbers, shapes, lengths in words, categories, duplicates and bad rows of a source, one fact a line."""
    found = scan(source, kind, split=split)
    check_usable(found, source, kind)
    records: Sequence[Record] = found.records
    facts = [
        ("source", str(source)),
        ("kind", kind_name(kind)),
        ("layout", ", ".join(f"{name} ({_rows(count)})" for name, count in found.formats.most_common())),
        ("records", f"{len(records)} from {_rows(found.rows)}"),
        ("multi-turn", _share(sum(map(_is_multi_turn, records)), len(records))),
        *_kind_facts(records),
        ("words in the prompt", _spread_of(_words(record.prompt) for record in records)),
        *_response_facts(records),
        ("categories", _top(record.category for record in records)),
        ("repeated prompts", _share(_repeats(records), len(records))),
    ]
    lines = [f"{name + ':':<23}{value}" for name, value in facts]
    return "\n".join(lines + _problem_lines(found))


def _problem_lines(found: Scan[Record]) -> list[str]:
    if not found.problems:
        return [f"{'bad rows:':<23}none"]
    listed = [f"  {problem}" for problem in found.problems[:LISTED_PROBLEMS]]
    more = len(found.problems) - len(listed)
    rest = [f"  and {more} more"] if more else []
    return [f"{'bad rows:':<23}{_share(len(found.problems), found.rows)}", *listed, *rest]


def _is_multi_turn(record: Record) -> bool:
    """Whether an earlier answer is part of the prompt, or several answers are learnt."""
    answers = [turn for turn in record.prompt if turn["role"] == "assistant"]
    return bool(answers) or (isinstance(record, Demonstration) and len(record.continuation) > 1)


def _kind_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    rankings = [record for record in records if isinstance(record, Ranking)]
    judgments = [record for record in records if isinstance(record, RuleJudgment)]
    if rankings:
        sizes = Counter(len(record.responses) for record in rankings)
        histogram = ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items()))
        pairs = sum(math.comb(len(record.responses), 2) for record in rankings)
        ties = sum(math.comb(n, 2) for record in rankings for n in Counter(record.ranks).values())
        return [("responses a ranking", histogram), ("tied pairs", _share(ties, pairs))]
    if judgments:
        return [
            ("verdicts", _top(record.verdict for record in judgments)),
            ("rules", _top(record.rule for record in judgments)),
        ]
    return []


def _response_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    lengths: list[int] = []
    for record in records:
        if isinstance(record, Demonstration):
            lengths += [len(turn["content"].split()) for turn in record.continuation if turn["role"] == "assistant"]
        elif isinstance(record, Ranking):
            lengths += [len(response.split()) for response in record.responses]
        elif isinstance(record, RuleJudgment):
            lengths.append(len(record.response.split()))
    return [("words in a response", _spread_of(lengths))] if lengths else []


def _words(conversation: Conversation) -> int:
    return sum(len(turn["content"].split()) for turn in conversation)


def _repeats(records: Sequence[Record]) -> int:
    """How many records have the prompt of an earlier one."""
    prompts = {tuple((turn["role"], turn["content"]) for turn in record.prompt) for record in records}
    return len(records) - len(prompts)


def _spread_of(values: Iterable[int]) -> str:
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]
    most = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return f"least {low}, median {middle}, mean {sum(ordered) / len(ordered):.1f}, 95 % up to {most}, most {high}"


def _top(names: Iterable[str | None]) -> str:
    counts = Counter(name for name in names if name is not None).most_common()
    if not counts:
        return "none"
    listed = ", ".join(f"{name} {count}" for name, count in counts[:LISTED_CATEGORIES])
    more = len(counts) - LISTED_CATEGORIES
    return f"{listed}, and {more} more" if more > 0 else listed


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "0"
