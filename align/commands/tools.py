"""The commands without a settings file: `align report`, `align data` and `align model`."""

import argparse
import sys
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

from align.core.errors import UserError
from align.core.launch import quiet_libraries
from align.core.settings import HUB_REPO

REPORT_HELP = "write the report of a run"
DATA_HELP = "data check, convert, clean: describe a file, write it in this project's layout, clean raw text by C4's rules"
MODEL_HELP = (
    "model list, fetch NAME, push FOLDER REPO, consolidate RUN: built-in models, downloads and uploads, a checkpoint as a "
    "plain folder"
)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are a `UserError` of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def report_command(arguments: list[str]) -> None:
    """Write the requested files, and print the path of each."""
    parser = OneLineParser(prog="align report", allow_abbrev=False, description="Write the report of a run.")
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="folder of one run, or one whose subfolders sft, reward, ppo and dpo hold runs; some may be missing",
    )
    parser.add_argument("--output", type=Path, help="file to write, of a single RUN (default: report.html in RUN)")
    parser.add_argument(
        "--markdown", action="store_true", help="print the results of align eval in RUN as Markdown tables instead"
    )
    options = parser.parse_args(arguments)
    if options.output and len(options.runs) > 1:
        raise UserError("--output: give one run; each run has its own report")
    from align.eval.report import page  # imported here so that --help does not wait for matplotlib

    if options.markdown:
        print(page.results_as_markdown(options.runs), end="")
    else:
        for run in options.runs:
            print(page.write_report(run, options.output))


def data_command(arguments: list[str]) -> None:
    """Describe a file, list rows of an evaluation that it holds, convert it to this project's layout, or clean raw text."""
    from align.data import KINDS

    parser = OneLineParser(prog="align data", allow_abbrev=False, description="Inspect, convert and clean data files.")
    actions = parser.add_subparsers(metavar="check|convert|clean", required=True)
    check = actions.add_parser("check", help="describe a file: records, lengths, ties, repeated prompts, bad rows")
    convert = actions.add_parser("convert", help="write a file in this project's layout, as JSON Lines")
    for action in (check, convert):
        text = "a file, a folder or the name of a hub data set; own columns: FILE[FIELD=COLUMN, ...]"
        action.add_argument("file", metavar="FILE", help=text)
        action.add_argument("--kind", help=f"kind of its records: {', '.join(KINDS)}; default: guessed from the first rows")
    convert.add_argument("output", metavar="OUT", type=Path, help="the .jsonl file to write")
    convert.add_argument(
        "--skip-bad-rows", "--skip_bad_rows", action="store_true", help="leave out rows that cannot be read"
    )
    convert.set_defaults(run=_convert)
    check.add_argument("--against", metavar="EVALUATION", help="list the rows of this source that share words with FILE")
    check.set_defaults(run=_check)
    clean = actions.add_parser("clean", help="clean raw text by C4's rules")
    clean.add_argument("file", metavar="FILE", help="rows with a `text`: a file, a folder or the name of a hub data set")
    clean.add_argument("--output", metavar="FILE", type=Path, required=True, help="the .jsonl file to write")
    clean.add_argument("--bad-words", "--bad_words", metavar="FILE", help="words, one per line, that no page may contain")
    clean.add_argument("--language", default="", help="keep only pages in this language, such as en (needs the extra clean)")
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


def _convert(options: Namespace) -> None:
    from align.data.check import convert_data

    print(convert_data(options.file, options.output, options.kind, options.skip_bad_rows))


def _clean(options: Namespace) -> None:
    from align.data.cleaning import Cleaner, clean_file, read_bad_words

    bad_words = read_bad_words(options.bad_words) if options.bad_words else ()
    cleaner = Cleaner(bad_words=bad_words, language=options.language)
    print(clean_file(options.file, options.output, cleaner, options.skip_bad_rows))


def model_command(arguments: list[str]) -> None:
    """List the built-in models, or print the folder of one model after making, downloading or consolidating it."""
    parser = OneLineParser(prog="align model", allow_abbrev=False, description="List, fetch, push and consolidate models.")
    actions = parser.add_subparsers(metavar="list|fetch|push|consolidate", required=True)
    actions.add_parser("list", help="list the models that need no hub").set_defaults(run=_list)
    fetch = actions.add_parser("fetch", help="make or download a model, and print its folder")
    fetch.add_argument("name", metavar="NAME", help="a built-in model, or a name on the hub")
    fetch.set_defaults(run=_fetch)
    push = actions.add_parser("push", help="push a saved model to the Hugging Face Hub")
    push.add_argument("folder", metavar="FOLDER", type=Path, help="a model's folder, or that of its run")
    push.add_argument("repo", metavar="USER/NAME", help="repository on the hub; created if it is missing")
    push.set_defaults(run=_push)
    whole = actions.add_parser("consolidate", help="write the policy of a checkpoint as a folder that loads elsewhere")
    whole.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run's folder (its last checkpoint), or a checkpoint")
    whole.add_argument("--output", required=True, metavar="DIR", help="the folder to write; replaced in one step")
    whole.set_defaults(run=_consolidate)
    options = parser.parse_args(arguments)
    options.run(options)


def _list(_: Namespace) -> None:
    from align.model_registry.registry import registered_models

    models = registered_models()
    width = max(map(len, models))
    for name, description in models.items():
        print(f"{name:<{width}}  {description}")


def _fetch(options: Namespace) -> None:
    quiet_libraries()  # only the path goes to stdout, for scripts
    from align.model_registry.registry import fetch_model

    print(fetch_model(options.name))


def _push(options: Namespace) -> None:
    quiet_libraries()
    if not HUB_REPO.fullmatch(options.repo):
        raise UserError(f"align model push: {options.repo!r} is not a repository on the hub; write user/name")
    from align.models.hub import push_model

    print(push_model(options.folder, options.repo))


def _consolidate(options: Namespace) -> None:
    quiet_libraries()
    from align.training.checkpoint.consolidation import consolidate

    checkpoint = consolidate(Path(options.source), Path(options.output))
    print(options.output)
    print(f"consolidated {checkpoint}", file=sys.stderr)
