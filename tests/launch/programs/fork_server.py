"""Forks the processes of a launch from one that has imported torch, DeepSpeed and the stages: they cost no imports.

A program that `tests/launch/launcher.py` starts and asks, a JSON line for each launch: the variables of each process
(`environments`), the scripts (see in_turn.py), and the files that take what processes print (`printed`, `told`). Answers
with the exit codes. Where one process fails, the others are ended, as a launcher does.
"""

import importlib
import json
import os
import signal
import sys
import time
from typing import Any

IMPORTED = ("align.sft", "align.reward", "align.ppo", "align.eval.all", "deepspeed")
LOST_SECONDS = 30.0
"""Within this time after a process failed, those of its launch have ended."""


def start(request: dict[str, Any], rank: int) -> int:
    """Fork one process of a launch, which runs the scripts; its id."""
    process = os.fork()
    if process:
        return process
    try:
        os.environ.clear()
        os.environ.update(request["environments"][rank])
        for stream, name in ((1, "printed"), (2, "told")):
            os.dup2(os.open(f"{request[name]}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
        from tests.launch.programs.in_turn import avoid_compiling, run_scripts

        avoid_compiling()
        run_scripts(request["scripts"])
    finally:  # it would serve as its parent does
        os._exit(1)


def wait_for(processes: list[int]) -> list[int]:
    """The exit codes of processes; those that one's failure leaves hanging are killed."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + LOST_SECONDS)
        time.sleep(0.02)
    for process in set(processes) - codes.keys():
        os.kill(process, signal.SIGKILL)
        codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return [codes[process] for process in processes]


def main() -> None:
    """Serve until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        codes = wait_for([start(request, rank) for rank in range(len(request["environments"]))])
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main()
