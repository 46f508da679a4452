"""The commands without a settings file: `align launch`, `align report`, `align data` and `align model`."""

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

REPORT_HELP = "write the report of a run"
DATA_HELP = "data check, convert, clean: describe a file, write it in this project's layout, clean raw text by C4's rules"
MODEL_HELP = (
    "model list, fetch NAME, push FOLDER REPO, merge ADAPTER, consolidate RUN: built-in models, downloads and uploads, an "
    "adapter or a checkpoint as a plain folder"
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
        help="folder of one run, or one whose subfolders hold the runs of stages, which their settings connect",
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
    parser = OneLineParser(
        prog="align model", allow_abbrev=False, description="List, fetch, push, merge, consolidate models."
    )
    actions = parser.add_subparsers(metavar="list|fetch|push|merge|consolidate", required=True)
    actions.add_parser("list", help="list the models that need no hub").set_defaults(run=_list)
    fetch = actions.add_parser("fetch", help="make or download a model, and print its folder")
    fetch.add_argument("name", metavar="NAME", help="a built-in model, a name on the hub, or a GGUF file")
    fetch.set_defaults(run=_fetch)
    push = actions.add_parser("push", help="push a saved model to the Hugging Face Hub")
    push.add_argument("folder", metavar="FOLDER", type=Path, help="a model's folder, or that of its run")
    push.add_argument("repo", metavar="USER/NAME", help="repository on the hub; created if it is missing")
    push.set_defaults(run=_push)
    merge = actions.add_parser("merge", help="merge an adapter into its base, and write a folder without an adapter")
    merge.add_argument("model", metavar="ADAPTER", help="the folder of an adapter, or that of its run")
    merge.add_argument("--output", required=True, metavar="DIR", help="the folder to write; replaced in one step")
    merge.set_defaults(run=_merge)
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
"""From a request to stop to the launcher's SIGKILL. A process that cannot save ends before it."""
LAUNCH_HELP = "start a stage in several processes, with the arguments of accelerate launch"


def launch_processes(arguments: list[str]) -> None:
    """Run accelerate's launcher, with the arguments of `accelerate launch`; signals reach every process.

    accelerate and torch end a failed or stopped launch with a traceback and exit code 1. They kill processes 30 seconds
    after a request to stop, and a launch of one process does not forward signals. Here the exit code is that of the process
    that failed first, or 75 after a request to stop, and processes have the time of `align.core.signals` to save.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    parser.prog = "align launch"
    options = parser.parse_args(arguments)
    if options.cpu and (options.num_processes or 1) > 1:
        # With --cpu, accelerate starts one process whatever --num_processes is, unless MPI does it.
        options.cpu, options.use_cpu, options.multi_gpu = False, True, True
        os.environ["ACCELERATE_USE_CPU"] = "true"
    # torch's agent hands these to its processes; without the last one, SIGUSR1 would kill it and leave them behind.
    options.signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    options.shutdown_timeout = SHUTDOWN_SECONDS
    os.environ[FROM_ALIGN_LAUNCH] = "1"
    for number in SIGNALS:  # the agent sets its own; a launch of one process keeps these
        signal.signal(number, _forward_signal)
    try:
        launch_command(options)
    except ValueError as error:
        if "unknown keys" not in str(error):
            raise
        advice = "remove them, or name another file by --config_file, such as configs/accelerate/ddp.yaml"
        raise UserError(f"{first_line(error).partition(', please')[0]}; {advice}") from error
    except SignalException:
        raise SystemExit(EXIT_STOPPED) from None
    except ChildFailedError as error:
        rank, first = first_failure(error.failures)
        if first.exitcode != EXIT_STOPPED:
            why = f"signal {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exit code {first.exitcode}"
            print(f"error: process {rank} ended first, by {why}; the others were ended", file=sys.stderr)
        raise SystemExit(_shell_exit_code(first.exitcode)) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(_shell_exit_code(error.returncode)) from None


def first_failure(failures: "dict[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The process that failed first.

    torch notes the failures that it finds, ends all other processes by SIGTERM, after 30 seconds by SIGKILL, and then notes
    how these ended. Times are whole seconds: within one, a process that was killed comes before those that lost it, and
    those that torch has ended by SIGTERM come last.
    """
    order = {-signal.SIGKILL: 0, EXIT_STOPPED: 2, -signal.SIGTERM: 3}
    return min(failures.items(), key=lambda item: (item[1].timestamp, order.get(item[1].exitcode, 1)))


def _forward_signal(number: int, _frame: FrameType | None) -> None:
    import psutil

    for child in psutil.Process(os.getpid()).children():
        child.send_signal(number)


def _shell_exit_code(code: int) -> int:
    """Convert an exit code to the shell's convention: 128 + the number of the signal that ended the process."""
    return 128 - code if code < 0 else code
