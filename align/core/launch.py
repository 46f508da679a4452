"""Run a stage as a program: parse settings, print errors in one line, shut down the process group."""

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
"""Environment variable that `align launch` sets in its processes."""
REPORT_SECONDS = 30.0
"""Time that a process waits for the first process of its machine to print an error that both have."""
EXIT_CLOSED_PIPE = 141
"""Exit code when the output pipe was closed (`align ... | head`), as in shells: 128 + SIGPIPE."""


@contextmanager
def _quiet_closed_pipes() -> Iterator[None]:
    """Exit quietly with code 141 when the pipe behind stdout or stderr was closed."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()  # an error at interpreter exit could not be caught
    except BrokenPipeError as error:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        heartbeat.stop_watching("output pipe closed" if closed else reason(error))
        if not closed:
            raise  # from a socket or another process
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in closed:
            os.dup2(nowhere, stream.fileno())
        raise SystemExit(EXIT_CLOSED_PIPE) from None


def _is_closed_pipe(stream: TextIO | None) -> bool:
    """Return whether a stream is a pipe without a reader."""
    try:
        descriptor = stream.fileno() if stream is not None else -1
    except (OSError, ValueError):  # an in-memory or closed stream
        return False
    if descriptor < 0 or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print user errors in one line, preceded by a traceback if ALIGN_TRACEBACK is set.

    Exit codes: 2 for a UserError, 130 for Ctrl-C, 75 after a stop request, 76 if another process was lost, 141 if the output
    pipe was closed, 1 for any other error.
    """
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[process {rank}] "  # launchers interleave the output of their processes
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
    """Print an error, wrapped on a terminal, and write it to torchelastic's error file."""
    if sys.stderr.isatty():
        line = textwrap.fill(
            line, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
    print(line, file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch shows it in its failure summary
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
    if "ACCELERATE_MIXED_PRECISION" in os.environ and FROM_ALIGN_LAUNCH not in os.environ:
        print("(the traceback below is from accelerate's launcher; the error is in the line above)", file=sys.stderr)


class Stage(NamedTuple):
    """A command with settings."""

    help: str
    """One line for `--help`."""
    path: str
    """`module:class:function`: the config class and the function that takes it."""
    positional: str = ""
    """Setting that may be passed positionally, before all options."""

    def named(self, words: Sequence[str]) -> list[str]:
        """Insert the option name before positional arguments.

        Raises:
            UserError: if the setting is passed both positionally and by name.
        """
        end = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        if not (self.positional and end):
            return list(words)
        option = f"--{self.positional}"
        if any(word.partition("=")[0] == option for word in words[end:]):
            raise UserError(f"{self.positional} is set twice: positionally and by {option}; remove one")
        return [option, *words]

    def load(self) -> tuple[type[Any], Any]:
        """Import the config class and the function."""
        module, config, function = self.path.split(":")
        return import_object(f"{module}:{config}"), import_object(f"{module}:{function}")


def run_stage(
    config_class: type[Config],
    stage: Callable[[Config], object],
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Run a stage with settings from `arguments` or the command line. User errors print one line and exit with code 2."""
    with one_line_errors():
        with _reported_once():
            config = _parse_settings(config_class, sys.argv[1:] if arguments is None else arguments, program)
        with stopped_by_signals():
            quiet_libraries()
            _check_launcher_variables()
            try:
                stage(config)
            except Stopped as stopped:
                end_process_group("" if stopped.everywhere else str(stopped), EXIT_STOPPED)
                raise
            end_process_group()


def _parse_settings(config_class: type[Config], words: Sequence[str], program: str | None) -> Config:
    from align.core.settings_parser import parse

    if not words and (needs := getattr(config_class, "needs", "")):
        launcher = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "python"
        raise UserError(
            f"no settings: set {needs}; to try it in a clone of the repository: "
            f"{program or f'{launcher} {sys.argv[0]}'} --config {getattr(config_class, 'first_run', '')}"
        )
    return parse(config_class, words, program)


@contextmanager
def _reported_once() -> Iterator[None]:
    """Let the first process of each machine print an error in settings, because all processes have the same error.

    The others wait for the launcher to terminate them: if one exited first, the launcher would kill the printing process.
    """
    try:
        yield
    except UserError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(REPORT_SECONDS)
        raise


def run_unless_finished(stage: Callable[[Any], Path], config: RunConfig) -> Path:
    """Run a stage unless it has finished, and return the model folder.

    An interrupted stage resumes from its latest checkpoint.
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
"""World sizes set by MPI launchers. accelerate reads them too."""


def _check_launcher_variables() -> None:
    """Reject stale or incomplete launcher variables, which would make torch wait for processes that do not exist."""
    numbers = {name: os.environ[name] for name in (*PROCESS_VARIABLES, "MASTER_PORT", *MPI_SIZES) if name in os.environ}
    for name, value in numbers.items():
        if not value.lstrip("-").isdigit():
            raise UserError(f"{name}={value} in the environment is not a number; {_unset([name])}")
    is_distributed = numbers.get("WORLD_SIZE", "1") != "1" or numbers.get("LOCAL_RANK", "-1") != "-1"
    missing = [name for name in ("RANK", "WORLD_SIZE", *ADDRESS_VARIABLES) if name not in os.environ]
    present = [name for name in PROCESS_VARIABLES if name in os.environ]
    if is_distributed and missing:
        raise UserError(
            f"{', '.join(f'{name}={os.environ[name]}' for name in present)} in the environment indicates several processes, "
            f"but {', '.join(missing)} is not set; {_unset(present)}"
        )
    if {"RANK", "WORLD_SIZE"} <= numbers.keys() and not 0 <= int(numbers["RANK"]) < int(numbers["WORLD_SIZE"]):
        raise UserError(f"RANK={numbers['RANK']} in the environment is not below WORLD_SIZE; {_unset(present)}")
    for name in MPI_SIZES:
        if numbers.get(name, "1") != "1" and "WORLD_SIZE" not in numbers:
            raise UserError(f"{name}={numbers[name]} in the environment: MPI launchers are not supported; {_unset([name])}")
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        if os.environ.get(name) == "true" and missing:
            raise UserError(f"{name}=true in the environment, but {', '.join(missing)} is not set; {_unset([name])}")


def _unset(names: Sequence[str]) -> str:
    return f"unset {' '.join(names)} to run one process, or use `align launch`"


def quiet_libraries() -> None:
    """Silence progress bars and warnings of libraries, unless `TRANSFORMERS_VERBOSITY` is set."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        enable_progress_bars()  # keep the progress bar of downloads
    # A filter, because importing DeepSpeed resets the level of its logger.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # addressed to library authors
    warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT sets it for GPT-2 layers
    threading.excepthook = _report_thread_failure


def _report_thread_failure(failure: threading.ExceptHookArgs) -> None:
    """Print a thread's traceback, except for TensorBoard's writer, which raises the same error on its next call."""
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def end_process_group(reason: str = "", code: int = 1) -> None:
    """Destroy the process group, which could otherwise abort the process at exit; see `stop_watching`."""
    import torch.distributed

    if waiting := heartbeat.stop_watching(reason, code):
        waiting.join()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
