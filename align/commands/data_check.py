"""`align data`: a description of a data file, what it shares with an evaluation, and the cleaning of raw text."""

from argparse import Namespace
from pathlib import Path

from align.commands.arguments import OneLineParser
from align.core.errors import UserError

HELP = "data check FILE, data clean FILE: describe a file, find evaluation rows in it; clean raw text by C4's rules"


def main(arguments: list[str]) -> None:
    """Describe a file, a folder or a hub data set, list the rows of an evaluation that are in it, or clean raw text.

    Args:
        arguments: the command line after `align data`.

    Raises:
        UserError: for invalid arguments, or a file without a usable record.
    """
    from align.data import KINDS, cleaning

    parser = OneLineParser(prog="align data", allow_abbrev=False, description=HELP)
    actions = parser.add_subparsers(metavar="check|clean", required=True)
    check = actions.add_parser("check", help="describe a file: records, lengths, ties, repeated prompts, bad rows")
    check.add_argument("file", metavar="FILE", help="a file, a folder or the name of a hub data set")
    check.add_argument("--kind", help=f"kind of its records: {', '.join(KINDS)}; default: guessed from the first rows")
    check.add_argument("--against", metavar="EVALUATION", help="list the rows of this source that share words with FILE")
    check.set_defaults(run=_check)
    clean = actions.add_parser("clean", help="clean raw text by C4's rules")
    clean.add_argument("file", metavar="FILE", help="rows with a `text`: a file, a folder or the name of a hub data set")
    clean.add_argument("--output", metavar="FILE", type=Path, required=True, help="the .jsonl file to write")
    clean.add_argument("--bad-words", "--bad_words", metavar="FILE", help="words, one per line, that no page may contain")
    for name in ("sentences", "words"):
        default = getattr(cleaning, name.upper())
        unit = {"sentences": "page", "words": "line"}[name]
        clean.add_argument(f"--{name}", type=int, default=default, help=f"fewest {name} of a {unit}; default {default}")
    clean.add_argument("--language", default="", help="keep only pages in this language, such as en (needs the extra clean)")
    probability = cleaning.LANGUAGE_PROBABILITY
    description = f"lowest probability of that language; default {probability}, as in C4"
    clean.add_argument("--probability", type=float, default=probability, help=description)
    clean.add_argument("--skip-bad-rows", "--skip_bad_rows", action="store_true", help="leave out rows without a text")
    clean.set_defaults(run=_clean)
    options = parser.parse_args(arguments)
    options.run(options)


def _check(options: Namespace) -> None:
    from align.data import check_data
    from align.data.check import describe_overlap

    if options.against:
        print(describe_overlap(options.file, options.against))
    else:
        print(check_data(options.file, options.kind))


def _clean(options: Namespace) -> None:
    from align.data.cleaning import CleaningRules, clean_file, read_bad_words

    bad_words = read_bad_words(options.bad_words) if options.bad_words else ()
    if not 0 <= options.probability <= 1:
        raise UserError(f"--probability {options.probability}: must be from 0 to 1")
    rules = CleaningRules(options.sentences, options.words, bad_words, options.language, options.probability)
    print(clean_file(options.file, options.output, rules, options.skip_bad_rows))
