"""One process of two that fails in a piece of work which both enter, in each of the ways that a process can fail.

Usage: two_ends.py FOLDER: each process writes what it raised to RANK.json, by the name of the case.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from align.core.errors import UserError
from align.runtime.distributed import run_on_all, run_on_main
from align.training.checkpoint import Checkpoint
from tests.launch.programs.in_turn import avoid_compiling
from tests.launch.programs.small import small_run

avoid_compiling()
folder = Path(sys.argv[1])
run, engine = small_run(folder / "run", nn.Linear(4, 4), 1, collective_timeout=60)
rank, results = run.accelerator.process_index, {}


def fail(error: Exception, on: int) -> Callable[[], str]:
    def work() -> str:
        if rank == on:
            raise error
        return "done"

    return work


def case(name: str, work: Callable[[], object]) -> None:
    try:
        results[name] = work()
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"


case("main, a mistake", lambda: run_on_main(fail(UserError("no such file"), 0), run.accelerator))
case("main, a bug", lambda: run_on_main(fail(KeyError("mean"), 0), run.accelerator))
case("main, well", lambda: run_on_main(fail(KeyError("mean"), 1), run.accelerator))
case("all, a mistake", lambda: run_on_all(fail(UserError("no such file"), 1), run.accelerator))
case("all, a bug", lambda: run_on_all(fail(OSError(5, "Input/output error"), 1), run.accelerator))
case("all, well", lambda: run_on_all(lambda: rank, run.accelerator))

free = run.memory.free
run.memory.free = lambda: 1_000 if rank == 1 else 10**15
big = nn.Linear(4096, 4100)
case("memory", lambda: run.memory.check(big))
run.memory.free = free

checkpoint, state = Checkpoint(run, engine, {}), engine.state
if rank == 1:
    engine.state = fail(MemoryError("no room for the copy"), 1)
case("save", lambda: checkpoint.save(1))
engine.state = state
checkpoint.save(1)
run.checkpoint = run.folder / "checkpoints" / "update-000001"
if rank == 1:
    engine.load_state = lambda *_: fail(OSError(5, "Input/output error"), 1)()
case("load", checkpoint.load)
del engine.state
if rank == 1:
    del engine.load_state
case("load again", checkpoint.load)
(folder / f"{rank}.json").write_text(json.dumps(results))
run.close()
