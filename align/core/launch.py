"""Run a stage as a program: settings from the command line, errors as one line, a clean end of the process group."""

import json
import logging
import os
import select
import shutil
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from align.core import heartbeat
from align.core.errors import OtherProcessError, UserError, first_line, is_lost_process, reason, without_secrets
from align.core.heartbeat import EXIT_LOST
from align.core.plugins import import_object
from align.core.settings import RunConfig
from align.core.signals import EXIT_STOPPED, Stopped, stopped_by_signals

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""
FROM_ALIGN_LAUNCH = "ALIGN_LAUNCH"
"""Variable of processes that `align launch` has started, which prints no traceback."""
EXIT_CLOSED_PIPE = 141
"""Exit code after the reader of the output has gone (`align ... | head`), as in shells: 128 + SIGPIPE."""


@contextmanager
def _quiet_closed_pipes() -> Iterator[None]:
    """End quietly with code 141 when the reader of the standard output or error has gone."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()  # here, because at the interpreter's exit nothing can catch its error
    except BrokenPipeError as error:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _reader_has_gone(stream)]
        heartbeat.stop_watching("nothing reads its output" if closed else reason(error))
        if not closed:
            raise  # of a socket or of another process
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in closed:
            os.dup2(nowhere, stream.fileno())
        raise SystemExit(EXIT_CLOSED_PIPE) from None


def _reader_has_gone(stream: TextIO | None) -> bool:
    """Whether a stream is a pipe that nothing reads."""
    try:
        descriptor = stream.fileno() if stream is not None else -1
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return False
    if descriptor < 0 or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error that a user can correct as one line; if ALIGN_TRACEBACK is set, after its traceback.

    Exit codes: 2 after a UserError, 130 after Ctrl-C, 75 after a request to stop, 76 after the loss of another process,
    141 when the output is no longer read, 1 after any other error.
    """
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[process {rank}] "  # a launcher mixes the output of all its processes
    with _quiet_closed_pipes():
        try:
            yield
        except (UserError, OtherProcessError) as error:
            if os.environ.get("ALIGN_TRACEBACK"):
                print(without_secrets("".join(traceback.format_exception(error))), file=sys.stderr, end="")
            message, code = without_secrets(" ".join(str(error).splitlines())), 2 if isinstance(error, UserError) else 1
            heartbeat.stop_watching(message, code)
            _print_error(f"{prefix}error: {message}")
            raise SystemExit(code) from None
        except RuntimeError as error:
            if not is_lost_process(error):
                heartbeat.stop_watching(reason(error))
                raise
            heartbeat.wait_for_report()
            print(f"{prefix}error: lost another process: {first_line(error)}", file=sys.stderr)
            heartbeat.stop_watching(first_line(error), EXIT_LOST)
            raise SystemExit(EXIT_LOST) from None
        except Stopped as stopped:
            if rank == "0" or not stopped.everywhere:
                print(f"{prefix}{stopped}", file=sys.stderr)
            heartbeat.stop_watching("" if stopped.everywhere else str(stopped), EXIT_STOPPED)
            raise SystemExit(EXIT_STOPPED) from None
        except BrokenPipeError:
            raise
        except Exception as error:
            heartbeat.stop_watching(reason(error))
            raise
        except KeyboardInterrupt:
            heartbeat.stop_watching("interrupted", EXIT_INTERRUPTED)
            print(f"{prefix}interrupted", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None


def _print_error(line: str) -> None:
    """Print an error, on a terminal broken between words, and let a launcher of several processes repeat it."""
    if sys.stderr.isatty():
        line = textwrap.fill(
            line, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
    print(line, file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # shown at the end of torch's summary of failures
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
    if "ACCELERATE_MIXED_PRECISION" in os.environ and FROM_ALIGN_LAUNCH not in os.environ:
        print("(accelerate prints a traceback of its launcher below; the error is the line above)", file=sys.stderr)


class Stage(NamedTuple):
    """A command with settings."""

    help: str
    """Its line in `--help`."""
    path: str
    """`module:class:function`: the class of its settings, and the function that runs with them."""
    positional: str = ""
    """The setting whose values may stand before all options, without its name."""

    def named(self, words: Sequence[str]) -> list[str]:
        """The words of a command line with the name of the positional setting.

        Raise a UserError if that setting is given both ways.
        """
        end = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        if not (self.positional and end):
            return list(words)
        option = f"--{self.positional}"
        if any(word.partition("=")[0] == option for word in words[end:]):
            raise UserError(f"{self.positional} is given twice: before the options and by {option}; leave one out")
        return [option, *words]

    def load(self) -> tuple[type[Any], Any]:
        """Import the class of the settings and the function that runs with them."""
        module, config, function = self.path.split(":")
        return import_object(f"{module}:{config}"), import_object(f"{module}:{function}")


def run_stage(
    config_class: type[Config],
    stage: Callable[[Config], object],
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Run a stage with settings from the command line, or `arguments`; a user's mistake is printed as one line, code 2."""
    from align.core.settings_parser import parse

    with one_line_errors(), stopped_by_signals():
        words = sys.argv[1:] if arguments is None else arguments
        if not words and (needs := getattr(config_class, "needs", "")):
            first_run = getattr(config_class, "first_run", "")
            command = (
                program or f"{'accelerate launch' if 'ACCELERATE_MIXED_PRECISION' in os.environ else 'python'} {sys.argv[0]}"
            )
            raise UserError(
                f"no settings given: a run needs {needs}; in a clone of the repository, this runs as it is: {command} "
                f"--config {first_run}"
            )
        config = parse(config_class, words, program)
        quiet_libraries()
        _check_launcher_variables()
        try:
            stage(config)
        except Stopped as stopped:
            end_process_group("" if stopped.everywhere else str(stopped), EXIT_STOPPED)
            raise
        end_process_group()


def run_unless_finished(stage: Callable[[Any], Path], config: RunConfig) -> Path:
    """Run a stage unless it has finished; returns the model's folder.

    An interrupted stage resumes from its last checkpoint.
    """
    folder = Path(config.output_dir)
    if (folder / "model").exists() and (folder / "finished").exists():
        return folder / "model"
    if (folder / "metrics.jsonl").exists():
        config.resume_from_checkpoint = True
    model = stage(config)
    (folder / "finished").touch()
    return model


PROCESS_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Numbers of processes of MPI launchers, which accelerate reads too."""


def _check_launcher_variables() -> None:
    """Refuse variables of launchers that are left over or set in part: torch would look for processes that do not exist."""
    numbers = {name: os.environ[name] for name in (*PROCESS_VARIABLES, "MASTER_PORT", *MPI_SIZES) if name in os.environ}
    for name, value in numbers.items():
        if not value.lstrip("-").isdigit():
            raise UserError(f"{name}={value} in the environment is not a number; {_unset([name])}")
    several = numbers.get("WORLD_SIZE", "1") != "1" or numbers.get("LOCAL_RANK", "-1") != "-1"
    missing = [name for name in ("RANK", "WORLD_SIZE", *ADDRESS_VARIABLES) if name not in os.environ]
    found = [name for name in PROCESS_VARIABLES if name in os.environ]
    if several and missing:
        raise UserError(
            f"{', '.join(f'{name}={os.environ[name]}' for name in found)} in the environment stands for several processes, "
            f"but {', '.join(missing)} is not set; {_unset(found)}"
        )
    if {"RANK", "WORLD_SIZE"} <= numbers.keys() and not 0 <= int(numbers["RANK"]) < int(numbers["WORLD_SIZE"]):
        raise UserError(f"RANK={numbers['RANK']} in the environment is not below WORLD_SIZE; {_unset(found)}")
    for name in MPI_SIZES:
        if numbers.get(name, "1") != "1" and "WORLD_SIZE" not in numbers:
            raise UserError(
                f"{name}={numbers[name]} in the environment stands for processes of MPI, which do not find each other here; "
                f"{_unset([name])}"
            )
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        if os.environ.get(name) == "true" and missing:
            raise UserError(f"{name}=true in the environment, but {', '.join(missing)} is not set; {_unset([name])}")


def _unset(names: Sequence[str]) -> str:
    return f"unset {' '.join(names)} for one process, or start with `align launch`"


def quiet_libraries() -> None:
    """Silence the loading bars and warnings of libraries, unless `TRANSFORMERS_VERBOSITY` is set."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        enable_progress_bars()  # downloads of gigabytes keep their progress bar
    # A filter, for importing DeepSpeed resets the level of its logger.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # they address the authors of libraries
    warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT sets it itself for the layers of GPT-2
    threading.excepthook = _report_thread_failure


def _report_thread_failure(failure: threading.ExceptHookArgs) -> None:
    """Print a thread's traceback, except that of TensorBoard's writer, whose next call raises the same error."""
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def end_process_group(reason: str = "", code: int = 1) -> None:
    """End the process group of a launched stage, which could make the process abort at exit; see `stop_watching`."""
    import torch.distributed

    if waiting := heartbeat.stop_watching(reason, code):
        waiting.join()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
