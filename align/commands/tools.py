"""Commands without a config file: `align launch`, `align report`, `align data` and `align model`."""

import argparse
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from align.core.errors import UserError, first_line
from align.core.launch import FROM_ALIGN_LAUNCH, quiet_libraries
from align.core.settings import HUB_REPO
from align.core.signals import EXIT_STOPPED, SIGNALS, WARNING_SECONDS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

REPORT_HELP = "write an HTML report of a run"
DATA_HELP = "check, convert or clean a data file"
MODEL_HELP = "list, fetch, push, merge or consolidate models"


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises a one-line `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def report_command(arguments: list[str]) -> None:
    """Write the requested reports and print their paths."""
    parser = OneLineParser(prog="align report", allow_abbrev=False, description="Write an HTML report of a run.")
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="Run folder, or a folder whose subfolders are the runs of consecutive stages.",
    )
    parser.add_argument("--output", type=Path, help="Output file. Requires a single RUN. (default: report.html in RUN)")
    parser.add_argument(
        "--markdown", action="store_true", help="Print the `align eval` results in RUN as Markdown tables instead."
    )
    options = parser.parse_args(arguments)
    if options.output and len(options.runs) > 1:
        raise UserError("--output requires a single run")
    from align.eval.report import page  # deferred, so that --help does not import matplotlib

    if options.markdown:
        print(page.results_as_markdown(options.runs), end="")
    else:
        for run in options.runs:
            print(page.write_report(run, options.output))


def data_command(arguments: list[str]) -> None:
    """Check a data file, find overlap with an evaluation set, convert it to the native format, or clean raw text."""
    from align.data import KINDS

    parser = OneLineParser(prog="align data", allow_abbrev=False, description="Inspect, convert and clean data files.")
    actions = parser.add_subparsers(metavar="check|convert|clean", required=True)
    check = actions.add_parser("check", help="summarize a data file: records, lengths, ties, duplicate prompts, bad rows")
    convert = actions.add_parser("convert", help="convert a data file to the native JSON Lines format")
    for action in (check, convert):
        text = "File, folder or Hub data set. Use FILE[FIELD=COLUMN, ...] to rename columns."
        action.add_argument("file", metavar="FILE", help=text)
        action.add_argument("--kind", help=f"Record type: {', '.join(KINDS)}. (default: inferred from the first rows)")
    convert.add_argument("output", metavar="OUT", type=Path, help="Output file (.jsonl).")
    convert.add_argument("--skip-bad-rows", "--skip_bad_rows", action="store_true", help="Skip invalid rows.")
    convert.set_defaults(run=_convert)
    check.add_argument("--against", metavar="EVALUATION", help="List rows of this evaluation set that overlap with FILE.")
    check.set_defaults(run=_check)
    clean = actions.add_parser("clean", help="clean raw text with the C4 rules")
    clean.add_argument("file", metavar="FILE", help="Rows with a `text` field: file, folder or Hub data set.")
    clean.add_argument("--output", metavar="FILE", type=Path, required=True, help="Output file (.jsonl).")
    clean.add_argument("--bad-words", "--bad_words", metavar="FILE", help="Word list, one per line. Drops pages with any.")
    clean.add_argument("--language", default="", help="Keep only pages in this language, such as en. Needs the extra clean.")
    clean.add_argument("--skip-bad-rows", "--skip_bad_rows", action="store_true", help="Skip rows without text.")
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
    """List the built-in models, or fetch, push, merge or consolidate one."""
    parser = OneLineParser(
        prog="align model", allow_abbrev=False, description="List, fetch, push, merge or consolidate models."
    )
    actions = parser.add_subparsers(metavar="list|fetch|push|merge|consolidate", required=True)
    actions.add_parser("list", help="list the built-in models").set_defaults(run=_list)
    fetch = actions.add_parser("fetch", help="create or download a model and print its path")
    fetch.add_argument("name", metavar="NAME", help="Built-in model, Hub id or GGUF file.")
    fetch.set_defaults(run=_fetch)
    push = actions.add_parser("push", help="push a saved model to the Hugging Face Hub")
    push.add_argument("folder", metavar="FOLDER", type=Path, help="Model folder or run folder.")
    push.add_argument("repo", metavar="USER/NAME", help="Hub repository. Created if it does not exist.")
    push.set_defaults(run=_push)
    merge = actions.add_parser("merge", help="merge a LoRA adapter into its base model")
    merge.add_argument("model", metavar="ADAPTER", help="Adapter folder or run folder.")
    merge.add_argument("--output", required=True, metavar="DIR", help="Output folder. Replaced atomically if it exists.")
    merge.set_defaults(run=_merge)
    export = actions.add_parser("consolidate", help="export the policy of a checkpoint as a model folder")
    export.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="Run folder (its latest checkpoint) or checkpoint.")
    export.add_argument("--output", required=True, metavar="DIR", help="Output folder. Replaced atomically if it exists.")
    export.set_defaults(run=_consolidate)
    options = parser.parse_args(arguments)
    options.run(options)


def _list(_: Namespace) -> None:
    from align.model_registry.registry import registered_models

    models = registered_models()
    width = max(map(len, models))
    for name, description in models.items():
        print(f"{name:<{width}}  {description}")


def _fetch(options: Namespace) -> None:
    quiet_libraries()  # keep stdout to the path, for scripts
    from align.model_registry.registry import fetch_model

    print(fetch_model(options.name))


def _push(options: Namespace) -> None:
    quiet_libraries()
    if not HUB_REPO.fullmatch(options.repo):
        raise UserError(f"align model push: {options.repo!r} is not a valid Hub repository; use user/name")
    from align.models.checkpoint import push_model

    print(push_model(options.folder, options.repo))


def _merge(options: Namespace) -> None:
    quiet_libraries()
    from align.models.checkpoint import merge_model

    merge_model(options.model, Path(options.output))
    print(options.output)


def _consolidate(options: Namespace) -> None:
    quiet_libraries()
    from align.training.checkpoint.consolidation import consolidate

    checkpoint = consolidate(Path(options.source), Path(options.output))
    print(options.output)
    print(f"consolidated {checkpoint}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------ align launch

SHUTDOWN_SECONDS = int(WARNING_SECONDS) + 5
"""Seconds between a stop request and the launcher's SIGKILL. Processes that cannot save exit earlier."""
LAUNCH_HELP = "launch a stage on several processes (arguments of `accelerate launch`)"


def launch_processes(arguments: list[str]) -> None:
    """Run `accelerate launch` and forward signals to every process.

    By itself, `accelerate launch` ends a failed or stopped run with a traceback and exit code 1, kills processes 30 seconds
    after a stop request, and does not forward signals to a single process. This wrapper exits with the code of the first
    process that failed, or 75 after a stop request, and gives processes the time defined in `align.core.signals` to save.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    parser.prog = "align launch"
    options = parser.parse_args(arguments)
    if options.cpu and (options.num_processes or 1) > 1:
        # With --cpu and without MPI, accelerate ignores --num_processes.
        options.cpu, options.use_cpu, options.multi_gpu = False, True, True
        os.environ["ACCELERATE_USE_CPU"] = "true"
    # torch's agent forwards these to its processes. Without SIGUSR1 in the list, SIGUSR1 would kill only the agent.
    options.signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    options.shutdown_timeout = SHUTDOWN_SECONDS
    os.environ[FROM_ALIGN_LAUNCH] = "1"
    for number in SIGNALS:  # kept by a single-process launch; torch's agent replaces them
        signal.signal(number, _forward_signal)
    try:
        launch_command(options)
    except ValueError as error:
        if "unknown keys" not in str(error):
            raise
        advice = "remove them or pass another --config_file, such as configs/accelerate/ddp.yaml"
        raise UserError(f"{first_line(error).partition(', please')[0]}; {advice}") from error
    except SignalException:
        raise SystemExit(EXIT_STOPPED) from None
    except ChildFailedError as error:
        rank, first = first_failure(error.failures)
        if first.exitcode != EXIT_STOPPED:
            why = f"signal {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exit code {first.exitcode}"
            print(f"error: process {rank} failed first ({why}); the others were stopped", file=sys.stderr)
        raise SystemExit(_shell_exit_code(first.exitcode)) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(_shell_exit_code(error.returncode)) from None


def first_failure(failures: "dict[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """Return the rank and failure of the process that failed first.

    After the first failures, torch terminates the remaining processes with SIGTERM (SIGKILL after 30 seconds) and records
    those exits too. Timestamps have a resolution of one second. Within a second, killed processes sort before the ones that
    lost their connection to them, and processes terminated by torch sort last.
    """
    order = {-signal.SIGKILL: 0, EXIT_STOPPED: 2, -signal.SIGTERM: 3}
    return min(failures.items(), key=lambda item: (item[1].timestamp, order.get(item[1].exitcode, 1)))


def _forward_signal(number: int, _frame: FrameType | None) -> None:
    import psutil

    for child in psutil.Process(os.getpid()).children():
        child.send_signal(number)


def _shell_exit_code(code: int) -> int:
    """Convert a negative exit code to the shell's convention: 128 + signal number."""
    return 128 - code if code < 0 else code
