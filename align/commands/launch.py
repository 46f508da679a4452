"""`align launch`: accelerate's launcher, but signals reach every process, and failures show no launcher traceback.

accelerate and torch end a failed or stopped launch with a traceback and exit code 1. They kill processes 30 seconds after a
request to stop, and a launch of one process does not forward signals. With `align launch`, the exit code is that of the
process that failed first, or 75 after a request to stop, and processes have the time of `align.core.signals` to save.
"""

import os
import signal
import subprocess
import sys
from types import FrameType
from typing import TYPE_CHECKING

from align.core.errors import UserError, first_line
from align.core.signals import EXIT_STOPPED, SIGNALS, WARNING_SECONDS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SHUTDOWN_SECONDS = int(WARNING_SECONDS) + 5
"""From a request to stop to the launcher's SIGKILL. A process that cannot save ends before it."""
HELP = "start a stage in several processes, with the arguments of accelerate launch"


def main(arguments: list[str]) -> None:
    """Run accelerate's launcher in this process, with the arguments of `accelerate launch`."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    parser.prog = "align launch"
    options = parser.parse_args(arguments)
    # torch's agent hands these to its processes; without the last one, SIGUSR1 would kill it and leave them behind.
    options.signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    options.shutdown_timeout = SHUTDOWN_SECONDS
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
