"""Run a stage as a program: settings from the command line, errors as one line, a clean end of the process group."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from align import liveness
from align.errors import OtherProcessError, UserError, first_line, reason, without_secrets
from align.liveness import EXIT_LOST
from align.signals import EXIT_STOPPED, Stopped, stopped_by_signals

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""


LOST_PROCESS = (
    *("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe"),
    *("Timed out waiting", "Application timeout", "Read timeout", "NCCL error"),
)
"""Messages of gloo and NCCL about a process that has gone, or whose machine cannot be reached."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a UserError as one line and exit with code 2; after Ctrl-C, print one line and exit with code 130.

    A run that stopped because it was asked to, and can be resumed, exits with code 75; one that lost another process with
    76. Any other error exits with code 1.
    """
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[process {rank}] "  # a launcher mixes the output of all its processes
    try:
        yield
    except UserError as error:
        message = without_secrets(" ".join(str(error).splitlines()))
        liveness.stop_watching(message, 2)
        print(f"{prefix}error: {message}", file=sys.stderr)
        raise SystemExit(2) from None
    except OtherProcessError as error:
        message = without_secrets(str(error))
        liveness.stop_watching(message)
        print(f"{prefix}error: {message}", file=sys.stderr)
        raise SystemExit(1) from None
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST_PROCESS):
            liveness.stop_watching(reason(error))
            raise
        liveness.wait_for_report()
        print(f"{prefix}error: lost another process: {first_line(error)}", file=sys.stderr)
        liveness.stop_watching(first_line(error), EXIT_LOST)
        raise SystemExit(EXIT_LOST) from None
    except Stopped as stopped:
        if rank == "0" or not stopped.everywhere:
            print(f"{prefix}{stopped}", file=sys.stderr)
        liveness.stop_watching("" if stopped.everywhere else str(stopped), EXIT_STOPPED)
        raise SystemExit(EXIT_STOPPED) from None
    except Exception as error:
        liveness.stop_watching(reason(error))
        raise
    except KeyboardInterrupt:
        liveness.stop_watching("interrupted", EXIT_INTERRUPTED)
        print(f"{prefix}interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


def run_stage(
    config_class: type[Config],
    stage: Callable[[Config], object],
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Run a stage with settings from the command line; a user's mistake is printed as one line, with exit code 2.

    Args:
        config_class: the stage's dataclass.
        stage: the function to call with the settings.
        arguments: `--config FILE` and `--key value` pairs; None: this process's command line.
        program: what `--help` calls the program.
    """
    from align.settings_parser import parse

    with one_line_errors(), stopped_by_signals():
        config = parse(config_class, sys.argv[1:] if arguments is None else arguments, program)
        quiet_libraries()
        try:
            stage(config)
        except Stopped as stopped:
            end_process_group("" if stopped.everywhere else str(stopped), EXIT_STOPPED)
            raise
        end_process_group()


def quiet_libraries() -> None:
    """Silence the loading bars and warnings of libraries; their errors are still printed.

    Only programs call this: importing `align` silences nothing. `TRANSFORMERS_VERBOSITY` overrides it.
    """
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        enable_progress_bars()  # downloads of gigabytes keep their progress bar
    # A filter, for importing DeepSpeed resets the level of its logger.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    warnings.filterwarnings("ignore", category=FutureWarning)  # they address the authors of libraries
    threading.excepthook = _report_thread_failure


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _report_thread_failure(failure: threading.ExceptHookArgs) -> None:
    """Print a thread's traceback, except that of TensorBoard's writer: its next call raises the same error in the run."""
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def end_process_group(reason: str = "", code: int = 1) -> None:
    """End the process group of a launched stage: one that is left open can make the process abort at exit.

    Args:
        reason: as for `liveness.stop_watching`, and so is the code.
    """
    import torch.distributed

    liveness.stop_watching(reason, code)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
