"""Several scripts, one after another, in the processes that a launcher started: their imports are paid for once.

Usage: in_turn.py FILE [compile], with a JSON list of command lines, each of which begins with a script's path. LOST_AFTER in
the environment replaces the seconds without a heartbeat after which a process counts as lost.

Without FILE, it forks the processes of launches from itself, which has imported torch, DeepSpeed and the stages. It reads a
JSON line for each launch: the variables of each process (`environments`), the `scripts`, and the files that take what they
print (`printed`, `told`). It answers with the exit codes. Where one process fails, the others are ended, as a launcher does.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from align.core import heartbeat
from align.core.launch import end_process_group


def avoid_compiling() -> None:
    """Let DeepSpeed exchange over gloo alone: its own exchange on one CPU is compiled on first use, for two minutes."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def run_scripts(scripts: Sequence[Sequence[str]]) -> NoReturn:
    """Run command lines one after another, and end this process."""
    # A script leaves the process group at its end, but the next one needs it.
    leave, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_: None
    status = 1
    try:
        for words in scripts:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    torch.distributed.destroy_process_group = leave
    end_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # What several runs of one process leave (DeepSpeed's engines, threads) can make the interpreter abort at its end.
    os._exit(status)


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


def serve() -> None:
    """Serve until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # every run of a stage collects garbage, and would look through all that was imported
    for line in sys.stdin:
        request = json.loads(line)
        codes = wait_for([start(request, rank) for rank in range(len(request["environments"]))])
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    heartbeat.LOST_AFTER = float(os.environ.get("LOST_AFTER", heartbeat.LOST_AFTER))
    if not sys.argv[1:]:
        serve()
    else:
        if sys.argv[2:] != ["compile"]:
            avoid_compiling()
        run_scripts(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
